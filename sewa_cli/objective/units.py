"""Units: what is resampled, left out in folds and kept aside, always as a whole.

A unit is a group of examples, or one example where the task names no groups. Where the user's loss
does not split into examples, it is a batch, or all batches that share a group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.objective.memo import Tensors
from sewa_cli.objective.tree import WALK, change, has_other_rows, has_rows, rows, take_rows, tensors

Unit = Literal["rows", "groups", "batches"]
METRIC = "metric "  # before a metric's name, in a memo


Label = Callable[[Any], Sequence[Hashable]]  # a batch ↦ the label of each example's group


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def labels_of(batch: Any, label: Label) -> Sequence[Hashable]:
    n = max(0, rows(batch))
    found = label(batch) if n else ()
    if len(found) != n:
        raise TaskError(
            f"groups() must return one label for each of the {n} examples of a batch, found "
            f"{len(found)}"
        )
    return found


def groups_of(batches: Iterable[Any], label: Label | None) -> Tensor | None:
    """The number of each example's group, [n]; None: each example stands for itself."""
    if label is None:
        return None
    return number_groups(one for batch in batches for one in labels_of(batch, label))


def number_groups(labels: Iterable[Hashable]) -> Tensor:
    """Number the groups of examples from 0, in the order in which they come, [n]."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels])


@dataclass(frozen=True)
class Grouping:
    """Which unit each part of the data belongs to; a part is an example or a batch.

    of     [parts] numbers from 0, in the order in which the units come
    sizes  [parts] examples in each part, float64
    weights  [units] examples in each unit
    """

    of: Tensor
    sizes: Tensor
    weights: Tensor

    @classmethod
    def make(cls, counts: Sequence[int], by_row: bool, groups: Tensor | None) -> Grouping:
        """Make units of batches with `counts` examples; `groups` [n] numbers those of examples."""
        sizes = torch.ones(sum(counts)) if by_row else torch.tensor(counts)
        of = torch.arange(len(sizes))
        if groups is not None:
            of = groups if by_row else _join_batches(counts, groups)
        sizes = sizes.double()
        weights = sizes.new_zeros(int(of.max()) + 1).index_add_(0, of, sizes)
        return cls(of, sizes, weights)

    def means(self, losses: Tensor) -> Tensor:
        """Losses of parts [..., parts] → those of units [..., units]."""
        weights = self.weights
        if len(weights) == len(self.of):  # each part is a unit
            return losses
        found = weights.new_zeros(*losses.shape[:-1], len(weights))
        return found.index_add_(-1, self.of, losses * self.sizes) / weights


def _join_batches(counts: Sequence[int], groups: Tensor) -> Tensor:
    """The unit of each batch [b]: batches that share a group are one, directly or by others."""
    batch = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    of, before = torch.arange(len(counts)), None
    while before is None or not torch.equal(of, before):
        before = of
        least = torch.full((int(groups.max()) + 1,), len(counts))
        least.scatter_reduce_(0, groups, of[batch], "amin")
        of = before.scatter_reduce(0, batch, least[groups], "amin")
    return number_groups(of.tolist())


@dataclass(frozen=True)
class UnitLosses:
    """Losses of whole batches [b] and the rows in each [b]; of single rows [n] where they split.

    groups   [n] numbers of the rows' groups; None: each row stands for itself
    metrics  what the task makes of all targets, from the same pass
    """

    batches: Tensor
    counts: Tensor
    rows: Tensor | None
    metrics: Mapping[str, float] | None = None
    groups: Tensor | None = None

    @property
    def mean(self) -> float:
        return float(self.batches @ self.counts / self.counts.sum())

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.batches).all())

    @property
    def group_count(self) -> int | None:
        return None if self.groups is None else count_groups(self.groups)

    def grouping(self, by_row: bool) -> Grouping:
        return Grouping.make(self.counts.int().tolist(), by_row, self.groups)

    def tensors(self) -> Tensors:
        """Return the losses as tensors for a memo; `of` is the way back."""
        found = {"batches": self.batches, "counts": self.counts}
        found |= {} if self.rows is None else {"rows": self.rows}
        found |= {} if self.groups is None else {"groups": self.groups}
        return found | {METRIC + name: number(x) for name, x in (self.metrics or {}).items()}

    @classmethod
    def of(cls, found: Tensors) -> UnitLosses:
        metrics = {
            name.removeprefix(METRIC): float(value)
            for name, value in found.items()
            if name.startswith(METRIC)
        }
        batches, counts = found["batches"], found["counts"]
        return cls(batches, counts, found.get("rows"), metrics or None, found.get("groups"))


def paired(found: Sequence[UnitLosses]) -> tuple[Tensor, Tensor, Unit]:
    """Losses [R, n] of the same units, and their weights [n]; of batches where any has no rows."""
    by_row = [one.rows for one in found if one.rows is not None]
    splits = len(by_row) == len(found)
    units = found[0].grouping(splits)
    losses = torch.stack(by_row if splits else [one.batches for one in found])
    unit: Unit = "rows" if found[0].group_count is None else "groups"
    return units.means(losses), units.weights, unit if splits else "batches"


def count_groups(groups: Tensor) -> int | None:
    """How many groups there are of numbered ones [n]; None: as many as examples."""
    found = int(groups.max()) + 1
    return found if found < len(groups) else None


def are_parts(rows: Tensor, loss: Tensor) -> bool:
    """Whether losses of single rows make up the batch's: their mean is it, and they see the rows.

    A loss that was computed before it was split (in the model itself, say) is the same for each.
    """
    if not torch.allclose(rows.mean(), loss, rtol=1e-4, atol=1e-6, equal_nan=True):
        return False
    return len(rows) == 1 or not bool(torch.isfinite(loss)) or not bool((rows == rows[0]).all())


def row_losses(
    loss: Callable[[Any, Any], Tensor], outputs: Any, batch: Any, n: int
) -> Tensor | None:
    """loss(outputs, batch) of each of the n rows alone, [n] float64; None if it cannot be split."""
    if not any(has_rows(x, n) for x in tensors(outputs)):  # none of the outputs belongs to a row
        return None
    by_row = [x for x in tensors((outputs, batch)) if has_rows(x, n)]

    def one(*parts: Tensor) -> Tensor:
        left = iter(parts)
        single = change((outputs, batch), lambda x: next(left)[None] if has_rows(x, n) else WALK)
        return loss(*single).reshape(())

    # in one go where the user's loss allows it; row by row is slow, but takes any loss. Copies:
    # what one attempt has changed in place, the next would see
    if not has_other_rows((outputs, batch), n):
        with suppress(Exception):
            together: Tensor = torch.func.vmap(one)(*(x.clone() for x in by_row))
            return together.cpu().double()  # MPS has no float64
    with suppress(Exception):  # whatever the user's loss makes of a single row
        each = (take_rows((outputs, batch), n, torch.tensor([i])) for i in range(n))
        return torch.stack([loss(*row).reshape(()) for row in each]).cpu().double()
    return None


@dataclass(frozen=True)
class Sample:
    """Some examples of a data set, in batches; `name` tells them from the whole set."""

    batches: list[Any]
    name: str

    @classmethod
    def of(cls, batches: list[Any], of_rows: int) -> Self:
        """Some of the selection data."""
        return cls(batches, f"selection_data ({sum(map(rows, batches))} of {of_rows})")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def take_evenly(data: Iterable[Any], most: int) -> Sample | None:
    """Return `most` batches from all over the data; None: there are no more than that.

    They are found in one pass that holds at most twice as many.
    """
    kept: list[Any] = []
    every, count = 1, 0
    for batch in data:
        if rows(batch) <= 0:
            continue
        if count % every == 0:
            kept.append(batch)
        count += 1
        if len(kept) > 2 * most:
            kept, every = kept[::2], 2 * every
    if count <= most:
        return None
    some = [kept[i * len(kept) // most] for i in range(most)]
    return Sample(some, f"selection_data ({most} of {count} batches)")


def keep_aside(
    data: Iterable[Any], share: float, seed: int, label: Label | None
) -> tuple[list[Any], list[Any]]:
    """Split the batches: those without a share of their examples, and these, drawn at random.

    `label` names the group of each example, and whole groups are drawn. All examples are held in
    memory from here on: a loader that shuffles would mix the two.
    """
    batches = [batch for batch in data if rows(batch) > 0]
    counts = [rows(batch) for batch in batches]
    found = groups_of(batches, label)
    of, what = (torch.arange(sum(counts)), "examples") if found is None else (found, "groups")
    units = int(of.max()) + 1 if len(of) else 0
    kept = round(share * units)
    if not 0 < kept < units:
        raise TaskError(
            f"--guard {share}: keeps {kept} of {units} selection {what} aside; use another "
            "share or more data"
        )
    drawn = torch.zeros(units, dtype=torch.bool)
    drawn[torch.randperm(units, generator=torch.Generator().manual_seed(seed))[:kept]] = True
    aside = torch.split(drawn[of], counts)
    total, kept = sum(counts), int(drawn[of].sum())
    parts = list(zip(batches, counts, aside, strict=True))

    def side(which: bool) -> list[Any]:
        indices = [(batch, n, (part == which).nonzero().reshape(-1)) for batch, n, part in parts]
        return [take_rows(batch, n, index) for batch, n, index in indices if len(index)]

    selection, heldout = side(False), side(True)
    if (sum(map(rows, selection)), sum(map(rows, heldout))) != (total - kept, kept):
        raise TaskError(
            "--guard: the selection batches do not split into examples; define heldout_data instead"
        )
    return selection, heldout
