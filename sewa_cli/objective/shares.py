"""A batch shared out among the ranks: each runs some of its rows, and all have all outputs.

Then the user's loss is called on the whole batch by every rank, so it is what it is on one,
whatever it does with rows. Back-propagated, each rank's own rows are those with a gradient. Where
rows need each other, or are too few, every rank runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.objective.classes import Targets
from sewa_cli.objective.tree import (
    WALK,
    Nest,
    change,
    has_rows,
    join_rows,
    rows,
    take_rows,
    tensors,
)
from sewa_cli.ranks import Ranks

Run = Callable[[Nest], Any]  # a batch ↦ what the model predicts for it
TINY = 1e-6  # whatever the outputs
CLOSE = 1e-3  # of the largest output: what a row may differ by if it is run with fewer others


@dataclass
class Shares:
    ranks: Ranks
    warn: Callable[[str], None]
    _apart: bool | None = None  # whether rows can be run apart; None: nobody has looked
    _seen: set[int] = field(default_factory=set)  # data that are the same on every rank

    def factor(self, batch: Nest, whole: bool) -> float:
        """Return the factor of a loss: FSDP takes means of gradients, and shares need the sum.

        `whole`: every rank runs all rows, so that each has the same gradient, and the mean is it.
        """
        is_shared = not whole and self._is_shared(batch)
        return float(self.ranks.size) if is_shared else 1.0

    def _is_shared(self, batch: Nest) -> bool:
        if not self.ranks.several or rows(batch) < self.ranks.size:
            return False
        return self._apart is not False

    def look(self, run: Run, batch: Nest) -> None:
        """Whether a batch can be shared out at all, by a few rows of the first."""
        if self._is_shared(batch) and self._apart is None:
            few = torch.arange(min(rows(batch), 2 * self.ranks.size + 1))
            self._look(run, take_rows(batch, rows(batch), few))

    def predict(self, run: Run, batch: Nest) -> Any:
        """The outputs of the whole batch."""
        self.look(run, batch)
        return self._gathered(run, batch) if self._is_shared(batch) else run(batch)

    @torch.no_grad()
    def _look(self, run: Run, batch: Nest) -> None:
        """Whether shares of a batch come to what the whole does."""
        whole = run(change(batch, lambda _: WALK))
        try:
            self._apart = all(self.ranks.gather(_alike(self._gathered(run, batch), whole)))
        except Exception:  # whatever the user's code makes of some rows
            if not self.ranks.all_come():
                raise  # of one rank's alone: it is the cause
            self._apart = False
        if not self._apart:
            self.warn(
                "predict() gives other outputs for a part of a batch, so every rank runs whole "
                "batches and nothing is faster"
            )

    def _gathered(self, run: Run, batch: Nest) -> Any:
        n = rows(batch)
        count = -(-n // self.ranks.size)
        own = run(take_rows(batch, n, self._index(n)))

        def gather(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return WALK
            if not has_rows(item, count):
                return item
            found = self.ranks.gather_rows(item.detach())
            found[self.ranks.rank] = item  # whose gradient is this rank's
            parts = [part[: len(self.ranks.rows(n, r))] for r, part in enumerate(found)]
            return torch.cat(parts)

        return change(own, gather)

    def _index(self, n: int) -> Tensor:
        """This rank's rows; as many on each, the last one twice where there is one less."""
        own, count = self.ranks.rows(n), -(-n // self.ranks.size)
        return torch.tensor([*own, *[own[-1]] * (count - len(own))])

    def checked(self, data: object, batches: Iterable[Nest]) -> Iterator[Nest]:
        """The same batches on every rank, or none at all: looked at the first time they come."""
        if not self.ranks.several or id(data) in self._seen:
            yield from batches
            return
        iterator = iter(batches)
        while True:
            batch = next(iterator, None)
            found = self.ranks.gather(None if batch is None else _told(batch))
            other = next((r for r, one in enumerate(found) if one != found[0]), None)
            if other is not None:
                raise TaskError(
                    f"rank {other} is given other batches than rank 0: every rank must see the "
                    "same data in the same order, and takes its own rows of each batch"
                )
            if batch is None:
                break
            yield batch
        self._seen.add(id(data))

    # ---- of targets, whose loss is a sum -------------------------------------------------------

    def own_targets(self, batch: Nest, targets: Targets) -> tuple[Nest, Targets]:
        """This rank's rows and the targets that they have, each with its weight in all."""
        if not self._is_shared(batch):
            return batch, targets
        n, index = rows(batch), self._index(rows(batch))
        first, last = self._span(targets, self.ranks.rank)
        start = self.ranks.rows(n)[0]
        own = replace(
            targets,
            where=targets.where[first:last] - start * targets.per_row,
            classes=targets.classes[first:last],
            weights=targets.weights[first:last],
            rows=targets.rows[first:last] - start,
            shape=(len(index), *targets.shape[1:]),
        )
        return take_rows(batch, n, index), own

    def _span(self, targets: Targets, rank: int) -> tuple[int, int]:
        """Return where a rank's targets begin and end."""
        own = self.ranks.rows(targets.shape[0], rank)
        ends = torch.tensor([own.start, own.stop], device=targets.rows.device)
        first, last = torch.searchsorted(targets.rows, ends).tolist()
        return first, last

    def owners(self, batch: Nest, targets: Targets, whole: bool) -> Tensor:
        """Which rank runs each target [t]; -1: all of them do."""
        found = torch.full((len(targets.where),), -1)
        if not whole and self._is_shared(batch):
            for rank in range(self.ranks.size):
                first, last = self._span(targets, rank)
                found[first:last] = rank
        return found

    def fill(self, found: Tensor, owners: Tensor) -> Tensor:
        """found [t, …], in which each rank has those that are its own → all of them, in place."""
        if not self.ranks.several or not bool((owners >= 0).any()):
            return found
        places = [
            (owners == rank).nonzero()[:, 0].to(found.device) for rank in range(self.ranks.size)
        ]
        most = max(map(len, places))
        own = found[places[self.ranks.rank]]
        padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        for where, part in zip(places, self.ranks.gather_rows(padded), strict=True):
            found[where] = part[: len(where)]
        return found

    def gather_targets(self, own: Tensor, batch: Nest, targets: Targets) -> Tensor:
        """Join the values that each rank has found of its targets [t]."""
        if not self._is_shared(batch):
            return own
        spans = [self._span(targets, rank) for rank in range(self.ranks.size)]
        most = max(last - first for first, last in spans)
        found = self.ranks.gather_rows(torch.cat([own, own.new_zeros(most - len(own))]))
        return torch.cat(
            [part[: last - first] for part, (first, last) in zip(found, spans, strict=True)]
        )


def whole_batches(data: Iterable[Nest], ranks: Ranks) -> Iterator[Nest]:
    """Batches of which each rank has some rows → all rows, in the ranks' order, on every rank.

    One may have none left when others still have some.
    """
    own = iter(data)
    while found := [part for part in ranks.gather(next(own, None)) if part is not None]:
        batch = join_rows(found, [rows(part) for part in found])
        if batch is None:
            raise TaskError(
                "the outputs of the ranks cannot be joined; put the examples in the first dimension"
            )
        yield batch


def _told(batch: Nest) -> str:
    return str([(x.shape, x.dtype, float(x.double().sum())) for x in tensors(batch)])


def _alike(one: Any, two: Any) -> bool:
    pairs = list(zip(tensors(one), tensors(two), strict=True))
    size = max((_largest(x) for x in tensors(two)), default=0.0)
    return all(a.shape == b.shape and _close(a, b, size) for a, b in pairs)


def _largest(x: Tensor) -> float:
    is_some = x.is_floating_point() and x.numel() > 0
    return float(x.float().nan_to_num(0.0, 0.0, 0.0).abs().max()) if is_some else 0.0


def _close(one: Tensor, two: Tensor, size: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, two)
    one, two = one.float(), two.float()
    return torch.allclose(one, two, rtol=CLOSE, atol=CLOSE * size + TINY, equal_nan=True)
