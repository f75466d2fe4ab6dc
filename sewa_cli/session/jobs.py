"""A job: some weights, scored by some of the task's parts. The same numbers whoever does it.

What the task's code draws depends on the seed and the part alone, and there is one thread: sums
that are split among several would differ in their last bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError, UserCodeError
from sewa_cli.objective.model import FlatModel, find_device
from sewa_cli.objective.tree import to_device, unchanged
from sewa_cli.rng import seed_of, seeded
from sewa_cli.session.building import build_model
from sewa_cli.session.cache import digest
from sewa_cli.task import Task, load_task
from sewa_cli.task.scoring import Score

Kind = Literal["selection", "heldout"]


class Job(NamedTuple):
    weights: Tensor  # [P], float32, on the processor; many jobs may share one
    kind: Kind
    parts: tuple[int, ...]  # by their places in `Places.at`


class Failure(NamedTuple):
    line: str
    is_task: bool  # what the task's code returned is no score: no other part will do better


Result = list[Score] | Failure  # one for each part


class Places(NamedTuple):
    """Where the parts of a kind are: in which of the task's lists, and at which places of it."""

    of: Kind
    at: Sequence[int]


@dataclass(frozen=True)
class Recipe:
    """All that another process needs to do the same jobs; can be pickled."""

    config: Config
    newest: Path  # of the checkpoints: a task may be made from it
    integers: Mapping[str, Tensor]  # of the model's state, which the weights of a job lack
    device: str
    places: Mapping[Kind, Places]
    lists: Mapping[Kind, str | None]  # what `told` says of the task's


def told(parts: Sequence[Any]) -> str | None:
    """A name for just these parts in this order; None: some are of a kind that has no such name."""
    return digest(*parts) if all(map(_is_plain, parts)) else None


def _is_plain(part: Any) -> bool:
    """Made of what reads the same in every process; a pickle of a set, say, does not."""
    if isinstance(part, Mapping):
        return all(map(_is_plain, (*part.keys(), *part.values())))
    if isinstance(part, list | tuple):
        return all(map(_is_plain, part))
    if isinstance(part, np.ndarray):
        return not part.dtype.hasobject
    plain = Tensor | bool | int | float | str | bytes | None
    return isinstance(part, plain)


def parts_of(task: Task, of: Kind, seed: int) -> list[Any]:
    """The task's own list of parts, else the batches of its data."""
    scoring = task.scoring
    assert scoring is not None
    with seeded(seed):  # seeds may be drawn, a loader may shuffle
        if scoring.parts is None:
            data = task.selection_data if of == "selection" else task.heldout_data
            return [] if data is None else list(data)
        listed = scoring.parts if of == "selection" else scoring.heldout
        return [] if listed is None else listed.list()


@dataclass(frozen=True)
class Examiner:
    task: Task
    model: FlatModel
    seed: int
    places: Mapping[Kind, Places]
    lists: Mapping[Kind, Sequence[Any]]  # the task's, as `parts_of` gives them

    def evaluate(self, job: Job) -> list[Score]:
        scoring = self.task.scoring
        assert scoring is not None
        of, places = self.places[job.kind]
        at = [places[part] for part in job.parts]
        self.model.set(job.weights)
        self.model.module.eval()
        scores: list[Score] = []
        for some in [at] if scoring.at_once else [[place] for place in at]:
            parts = to_device([self.lists[of][place] for place in some], self.model.device)
            own = seed_of(self.seed, get_args(Kind).index(of), some[0])
            with seeded(own), unchanged(parts, "score()"), torch.no_grad(), _one_thread():
                scores += scoring.score(self.model.module, parts)
            self.model.check_untouched("score()")
        return scores


def scores_by_parts(
    task: Task, model: FlatModel, config: Config, most: int | None = None
) -> Callable[[Any], dict[str, float]]:
    """Score what is in the model by the task's parts, held-out ones if any: means by name.

    `most`: only so many parts.
    """
    seed, metric = config.seed, config.objective.metric
    lists: dict[Kind, list[Any]] = {of: parts_of(task, of, seed) for of in get_args(Kind)}
    kind: Kind = "heldout" if lists["heldout"] else "selection"
    count = len(lists[kind]) if most is None else min(most, len(lists[kind]))
    examiner = Examiner(task, model, seed, {kind: Places(kind, range(count))}, lists)

    def means(_: Any) -> dict[str, float]:
        found = examiner.evaluate(Job(model.flat.cpu(), kind, tuple(range(count))))
        if metric is not None and task.scoring is not None:
            task.scoring.losses(found, metric, config.objective.direction)  # it has such a metric
        names = dict.fromkeys(name for score in found for name in score)
        return {
            name or "score": sum(score[name] for score in found) / len(found)
            for name in names
            if all(name in score for score in found)
        }

    return means


def open_examiner(recipe: Recipe) -> Examiner:
    """As this process has it from the recipe alone."""
    config, seed = recipe.config, recipe.config.seed
    if config.task is None:
        raise ConfigError("workers: need a task that they can import: a file, or a module's name")
    newest = cache(lambda: open_checkpoint(recipe.newest, Reads(), config.state_key))
    with seeded(seed):
        task = load_task(config.task, config.args, newest)
    with seeded(seed):
        model = build_model(task, newest(), find_device(recipe.device))
    model.load(recipe.integers.items())
    lists = {of: parts_of(task, of, seed) for of in {of for of, _ in recipe.places.values()}}
    for of, at in recipe.places.values():
        if at and max(at) >= len(lists[of]):
            raise TaskError(
                f"{Path(task.source).name}: lists {len(lists[of])} parts in a worker, and more "
                "before: what it lists must not change from one process to the next"
            )
    for of, parts in lists.items():
        if None not in (before := recipe.lists[of], now := told(parts)) and before != now:
            raise TaskError(
                f"{Path(task.source).name}: lists other parts in a worker, or the same in another "
                "order: what it lists must not change from one process to the next (the order of a "
                "set does)"
            )
    return Examiner(task, model, seed, recipe.places, lists)


def outcome(evaluate: Callable[[Job], list[Score]], job: Job) -> Result:
    """An exception in the user's code is a result like others."""
    try:
        return evaluate(job)
    except UserCodeError as error:
        return Failure("; ".join(error.faults) + _place(error.frames), is_task=False)
    except TaskError as error:
        return Failure("; ".join(error.faults), is_task=True)


def _place(frames: str) -> str:
    """The line of the user's file that raised it."""
    found = re.findall(r'^  File "(.*)", line (\d+)', frames, re.MULTILINE)
    return f" ({Path(found[-1][0]).name}, line {found[-1][1]})" if found else ""


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _blas().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@cache  # to go through all libraries of the process takes a millisecond
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
