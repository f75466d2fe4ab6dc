"""Batches and outputs: nested tuples, lists, dicts and dataclasses with tensors at the leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sewa_cli.errors import TaskError

Nest = Any
WALK = object()  # «this is no leaf»


def rows(batch: Nest) -> int:
    """The number of examples: the first dimension of the first array in the batch."""
    first = next((item for item in nodes(batch) if getattr(item, "shape", ())), None)
    if first is not None:
        return int(first.shape[0])
    return len(batch) if isinstance(batch, list | tuple) else 1


def nodes(nest: Nest) -> Iterator[Any]:
    """Yield a nest and everything in it, in the order in which `change` comes upon them."""
    yield nest
    inner: Iterable[Any] = ()
    if isinstance(nest, Mapping):
        inner = nest.values()
    elif is_dataclass(nest) and not isinstance(nest, type):
        inner = [getattr(nest, part.name) for part in fields(nest)]
    elif isinstance(nest, list | tuple):
        inner = nest
    for item in inner:
        yield from nodes(item)


@contextmanager
def unchanged(batch: Nest, whose: str = "predict() or loss()") -> Iterator[None]:
    """The user's code is to leave the batch as it is; TaskError if it has not."""
    watched = [x for x in tensors(batch) if not x.is_inference()]
    versions = [tensor._version for tensor in watched]  # torch counts in-place changes
    yield
    if [tensor._version for tensor in watched] != versions:
        raise TaskError(
            f"{whose} changes the batch in place, so the next pass over it would "
            "see other data; work on a copy (x.clone())"
        )


def to_device(batch: Nest, device: torch.device) -> Nest:
    """The same batch with every tensor on `device`; tuples, lists and dicts are walked."""

    def move(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(device, non_blocking=True)
        own = getattr(item, "to", None)  # transformers' BatchEncoding, for one
        return own(device) if callable(own) else WALK

    return change(batch, move)


def change(nest: Nest, leaf: Callable[[Any], Any]) -> Nest:
    """A copy of nested tuples, lists and dicts, each leaf made another; `leaf` may answer WALK."""
    if (changed := leaf(nest)) is not WALK:
        return changed
    if isinstance(nest, Mapping):
        changed = {key: change(value, leaf) for key, value in nest.items()}
        return changed if isinstance(nest, dict) and type(nest) is dict else _like(nest, changed)
    if is_dataclass(nest) and not isinstance(nest, type):
        parts = {part.name: getattr(nest, part.name) for part in fields(nest)}
        return replace(nest, **{name: change(value, leaf) for name, value in parts.items()})
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(change(item, leaf) for item in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(change(item, leaf) for item in nest)
    return nest


def _like(nest: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """`items` in a mapping of the same kind if it can be: some outputs have attributes."""
    try:
        alike: Any = copy(nest)
        for key, value in items.items():
            alike[key] = value
        return alike
    except Exception:
        return items


def tensors(nest: Nest) -> list[Tensor]:
    """All of them, in the order in which `change` comes upon them."""
    return [item for item in nodes(nest) if isinstance(item, Tensor)]


def has_rows(item: Any, n: int) -> bool:
    """A tensor whose first dimension counts the rows of a batch of n."""
    return isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == n


def take_rows(nest: Nest, n: int, index: Tensor) -> Nest:
    """Rows `index` of a nest of n rows: tensors, arrays, lists of words; the rest stays whole."""

    def take(item: Any) -> Any:
        if has_rows(item, n):
            return item.index_select(0, index.to(item.device))
        if isinstance(item, np.ndarray) and item.ndim > 0 and len(item) == n:
            return item[index.numpy()]
        if is_words(item, n):
            return type(item)(item[i] for i in index.tolist())
        return WALK

    return change(nest, take)


def has_other_rows(nest: Nest, n: int) -> bool:
    """Whether there are rows that are no tensors: arrays, lists of words."""
    return any(
        is_words(item, n) or (isinstance(item, np.ndarray) and item.ndim > 0 and len(item) == n)
        for item in nodes(nest)
    )


def join_rows(nests: Sequence[Nest], counts: Sequence[int]) -> Nest | None:
    """One nest of all their rows; None if they differ in anything but the rows of their tensors."""
    first = nests[0]
    if any(type(nest) is not type(first) for nest in nests):
        return None
    if isinstance(first, Tensor):
        if all(has_rows(nest, n) for nest, n in zip(nests, counts, strict=True)):
            alike = len({(nest.shape[1:], nest.dtype, nest.device) for nest in nests}) == 1
            return torch.cat(list(nests)) if alike else None
        return first if all(torch.equal(nest, first) for nest in nests) else None
    if isinstance(first, bool | int | float | str | bytes):
        return first if all(nest == first for nest in nests) else None
    if type(first) in (list, tuple):
        if any(is_words(nest, n) for nest, n in zip(nests, counts, strict=True)):
            return None
        if len({len(nest) for nest in nests}) > 1:
            return None
        items = [join_rows(column, counts) for column in zip(*nests, strict=True)]
        return None if any(item is None for item in items) else type(first)(items)
    if isinstance(first, Mapping):
        if any(list(nest) != list(first) for nest in nests):
            return None
        found = {key: join_rows([nest[key] for nest in nests], counts) for key in first}
        is_whole = not any(item is None for item in found.values())
        return (found if type(first) is dict else _like(first, found)) if is_whole else None
    return None  # whatever else it may be


def is_words(item: Any, n: int) -> bool:
    """A list of n words or numbers: one for each row."""
    is_list = isinstance(item, list | tuple) and len(item) == n
    return is_list and all(isinstance(word, str | bytes | int | float) for word in item)
