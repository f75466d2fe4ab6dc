"""Which tensors of a trainer's nested file are weights.

All tensors are, whatever key they are saved under, but for three kinds. The state of the training
(optimizer, schedulers, callbacks) and copies of the weights (EMA, best) are left out. Single
numbers, integer tables and tensors among other values (`hyper_parameters`) are not averaged.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sewa_cli.checkpoints import toolkits
from sewa_cli.checkpoints.inert import Inert
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.text import few, shown

Way = tuple[Any, ...]  # the keys that lead to a value: ("model", "encoder", "weight")
Why = Literal["training", "copy", "unnamed", "other", "number"]
STATE_KEYS = ("state_dict", "model", "model_state_dict")  # weights, whatever their names are
_TRAINING = re.compile(r"optim(s|i[sz]ers?)?|sched(s|ulers?)?|callbacks?|loops")
_COPY = re.compile(r"ema|swa|ave|avg|averaged?|shadow|best")
_DEEPEST = 64
_MOST_VALUES = 1_000_000


@dataclass(frozen=True)
class State:
    """The weights among all that a file holds."""

    content: Any
    tensors: dict[str, Any]
    ways: dict[str, Way]  # to the tensors
    left: dict[Way, Why]  # what else holds tensors
    groups: tuple[str, ...]  # the keys before each name, where there are several state dicts
    tree: _Tree

    def left_keys(self) -> dict[str, Why]:
        return {".".join(map(_word, way)): why for way, why in self.left.items()}

    def filled(self, averaged: Mapping[str, Any]) -> Any:
        """Return the file's content with other weights, and without what is left out."""
        tensors = {way: averaged[name] for name, way in self.ways.items()}
        toolkit = toolkits.of_content(self.content)
        kept_keys = toolkit.kept if toolkit else ()
        gone = {way for way, why in self.left.items() if why in ("training", "copy", "unnamed")}
        gone |= {(key,) for key, value in items(self.content) if is_training(key, value)}
        gone -= {(key,) for key in kept_keys}

        def fill(value: Any, way: Way) -> Any:
            if way in tensors:
                return tensors[way]
            if not isinstance(value, dict | list | tuple) or not self.tree.holds(value):
                return value
            kept = {
                key: fill(inner, (*way, key))
                for key, inner in items(value)
                if (*way, key) not in gone
            }
            return kept if isinstance(value, dict) else type(value)(kept.values())

        return fill(self.content, ())


class _Tree:
    """Dicts and lists, and which of them hold a tensor at any depth."""

    def __init__(self, path: Path, content: Any, is_tensor: Callable[[object], bool]) -> None:
        self._path = path
        self.is_tensor = is_tensor
        self._holders: set[int] = set()
        self._visited = 0
        above: dict[int, list[int]] = {}
        todo, found = [content], list[int]()
        while todo:
            value = todo.pop()
            for _, inner in items(value):
                if is_tensor(inner):
                    found.append(id(value))
                elif isinstance(inner, dict | list | tuple | Inert):
                    if id(inner) not in above:
                        todo.append(inner)
                    above.setdefault(id(inner), []).append(id(value))
        while found:
            if (holder := found.pop()) not in self._holders:
                self._holders.add(holder)
                found += above.get(holder, ())

    def holds(self, value: Any) -> bool:
        return self.is_tensor(value) or id(value) in self._holders

    def check(self, way: Way) -> None:
        """Refuse dicts within themselves, and few that stand for endlessly many."""
        self._visited += 1
        if len(way) > _DEEPEST or self._visited > _MOST_VALUES:
            raise CheckpointError(
                f"{self._path}: holds tensors nested without end; save model.state_dict()"
            )

    def leaves(self, value: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
        """Yield the tensors, and what holds none and is not empty, each with its way."""
        self.check(way)
        if self.is_tensor(value):
            yield way, value
        elif self.holds(value) and not isinstance(value, Inert):
            for key, inner in items(value):
                yield from self.leaves(inner, (*way, key))
        elif not isinstance(value, dict | list | tuple) or value:
            yield way, value


def items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, Inert):
        return [(0, value.args), (1, value.state)]
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def find_weights(
    path: Path,
    content: Mapping[Any, Any],
    state_key: str | None,
    is_tensor: Callable[[object], bool],
    is_weight: Callable[[Any], bool],
) -> State:
    """Sort the tensors of a file; with `state_key`, those under this key alone are weights.

    is_weight: whether a tensor has floating-point numbers and is more than a single number.
    """
    tree = _Tree(path, content, is_tensor)
    chosen = None if state_key is None else _way_to(path, content, state_key)
    roots, left = _sort(content, tree, is_weight, chosen, copies=False)
    if not roots:  # copies are all the weights that there are
        roots, left = _sort(content, tree, is_weight, chosen, copies=True)
    if not roots:
        raise CheckpointError(
            f"{path}: no weights in it; it holds {_few(content)}; name their key with --state-key"
        )
    is_alone = len(roots) == 1
    tensors: dict[str, Any] = {}
    ways: dict[str, Way] = {}
    for root, value in roots.items():
        strip = len(root) - tree.is_tensor(value) if is_alone else 0
        top = (((key,), inner) for key, inner in items(value))
        inside = top if root == () else tree.leaves(value, root)
        for way, leaf in inside:
            if is_tensor(leaf):
                name = ".".join(map(_word, way[strip:]))
                if name in tensors:
                    raise CheckpointError(
                        f"{path}: two tensors are called {shown(name, 100)}; rename one"
                    )
                tensors[name], ways[name] = leaf, way
    groups = () if is_alone else tuple(dict.fromkeys(_word(root[0]) for root in roots))
    return State(content, tensors, ways, left, groups, tree)


def _sort(
    content: Any, tree: _Tree, is_weight: Callable[[Any], bool], chosen: Way | None, copies: bool
) -> tuple[dict[Way, Any], dict[Way, Why]]:
    """Return the state dicts and single weights, and all else that holds tensors.

    The file itself, (), is a state dict if it has tensors and nothing below it is one. A single
    weight in a dict of other values is none of the model's, unless a state dict is in there too.
    """
    found: dict[Way, Any] = {}
    left: dict[Way, Why] = {}
    around: set[Way] = {()}  # the dicts that state dicts lie in

    def sort(value: Any, way: Way) -> None:
        tree.check(way)
        if not tree.holds(value):
            return
        if way == chosen:
            found[way] = value
        elif chosen is not None and chosen[: len(way)] == way:
            descend(value, way)
        elif tree.is_tensor(value):
            if is_weight(value):
                found[way] = value
            else:
                left[way] = "number"
        elif isinstance(value, Inert):
            left[way] = "other"
        elif way and is_training(way[-1], value):
            left[way] = "training"
        elif way and _has_word(way[-1], _COPY) and not copies:
            left[way] = "copy"
        elif way and _is_state(value, way, tree, is_weight):
            found[way] = value
            around.update(way[:depth] for depth in range(len(way)))
        else:
            descend(value, way)

    def descend(value: Any, way: Way) -> None:
        for key, inner in items(value):
            sort(inner, (*way, key))

    sort(content, ())
    roots = {}
    for way, value in found.items():
        if tree.is_tensor(value) and way[:-1] not in around:
            left[way[:-1]] = "other"
        elif chosen is None or way == chosen:
            roots[way] = value
        else:
            left[way] = "unnamed"
    is_bare = any(tree.is_tensor(inner) for _, inner in items(content)) and (roots or copies)
    if chosen is None and is_bare and all(map(tree.is_tensor, roots.values())):
        left = {way: why for way, why in left.items() if len(way) > 1 or why != "number"}
        roots = {(): content}
    return roots, left


def _is_state(value: Any, way: Way, tree: _Tree, is_weight: Callable[[Any], bool]) -> bool:
    children = [inner for _, inner in items(value)]
    if way[-1] in STATE_KEYS and any(map(tree.is_tensor, children)):
        return True
    leaves = list(tree.leaves(value, way))
    if not all(tree.is_tensor(leaf) for _, leaf in leaves):
        return False
    if way[-1] in STATE_KEYS:
        return True
    if len(children) == 1 and not tree.is_tensor(children[0]):
        return False  # the state dict is deeper
    keys = {key for inside, _ in leaves for key in inside[len(way) : -1]}
    has_other_state = any(is_training(key, None) or _has_word(key, _COPY) for key in keys)
    return not has_other_state and any(is_weight(leaf) for _, leaf in leaves)


def is_training(key: Any, value: Any) -> bool:
    has_groups = isinstance(value, dict) and "param_groups" in value
    return has_groups or _has_word(key, _TRAINING)


def _has_word(key: Any, pattern: re.Pattern[str]) -> bool:
    words = re.split(r"[^a-z]+", key.lower()) if isinstance(key, str) else ()
    return any(map(pattern.fullmatch, words))


def _way_to(path: Path, content: Mapping[Any, Any], state_key: str) -> Way:
    """The key itself, or a dotted path: `checkpoint.ema`."""
    if state_key in content:
        return (state_key,)
    way, here = tuple(state_key.split(".")), content
    for part in way:
        if not isinstance(here, dict) or part not in here:
            raise ConfigError(
                f"{path}: --state-key: no {state_key} in it; it holds {_few(content)}"
            )
        here = here[part]
    return way


def _word(key: Any) -> str:
    """Return the text of a key; few bytes of a file can stand for a tuple without end."""
    return reprlib.repr(key) if isinstance(key, tuple) else str(key)


def _few(keys: Any) -> str:
    return few([shown(_word(key), 40) for key in keys], 8) or "nothing"
