"""Selection examples kept aside, if there are no held-out data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from sewa_cli.errors import TaskError
from sewa_cli.objective.objective import Batch, Data
from sewa_cli.objective.tree import rows, take_rows
from sewa_cli.objective.units import Label, groups_of


@dataclass(frozen=True)
class Sample:
    """Some examples of a data set, in batches; `name` tells them from the whole set."""

    batches: list[Batch]
    name: str

    @classmethod
    def of(cls, batches: list[Batch], of_rows: int) -> Self:
        """Some of the selection data."""
        return cls(batches, f"selection_data ({sum(map(rows, batches))} of {of_rows})")

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def take_evenly(data: Data, most: int) -> Sample | None:
    """Return `most` batches from all over the data; None: there are no more than that.

    They are found in one pass that holds at most twice as many.
    """
    kept: list[Batch] = []
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
    data: Data, share: float, seed: int, label: Label | None
) -> tuple[list[Batch], list[Batch]]:
    """Split the batches: those without a share of their examples, and these, drawn at random.

    `label` names the group of each example, and whole groups are drawn. All examples are held in
    memory from here on: a loader that shuffles would mix the two.
    """
    batches = [batch for batch in data if rows(batch) > 0]
    counts = [rows(batch) for batch in batches]
    found = groups_of(batches, label)
    of, what = (torch.arange(sum(counts)), "rows") if found is None else (found, "groups")
    units = int(of.max()) + 1 if len(of) else 0
    kept = round(share * units)
    if not 0 < kept < units:
        raise TaskError(f"--guard {share}: cannot keep {kept} of {units} selection {what} aside")
    drawn = torch.zeros(units, dtype=torch.bool)
    drawn[torch.randperm(units, generator=torch.Generator().manual_seed(seed))[:kept]] = True
    aside = torch.split(drawn[of], counts)
    total, kept = sum(counts), int(drawn[of].sum())
    parts = list(zip(batches, counts, aside, strict=True))

    def side(which: bool) -> list[Batch]:
        indices = [(batch, n, (part == which).nonzero().reshape(-1)) for batch, n, part in parts]
        return [take_rows(batch, n, index) for batch, n, index in indices if len(index)]

    selection, heldout = side(False), side(True)
    if (sum(map(rows, selection)), sum(map(rows, heldout))) != (total - kept, kept):
        raise TaskError("--guard: the selection batches do not split into rows")
    return selection, heldout
