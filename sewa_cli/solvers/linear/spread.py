"""A cache of outputs [k, O] over several ranks: each has some of its columns, for all checkpoints.

Products with it are each rank's own work. What is mixed is gathered, O numbers; what is pulled back
is summed up, k numbers. Where the loss adds up over blocks of columns, nothing but sums is sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sewa_cli.ranks import Ranks
from sewa_cli.trajectory.deltas import Deltas
from sewa_cli.trajectory.dense import Dense


def own_columns(ranks: Ranks, numbers: int, block: int) -> slice:
    """Of O numbers, in blocks that stay together; all of them where they are too few to share."""
    if not ranks.several or numbers // block < ranks.size:
        return slice(0, numbers)
    own = ranks.rows(numbers // block)
    return slice(own.start * block, own.stop * block)


class Spread:
    """As `Dense` and `Deltas` are, for a cache of which this rank has `columns`."""

    def __init__(self, own: Dense | Deltas, columns: slice, numbers: int, ranks: Ranks) -> None:
        self.own, self.columns, self.numbers, self.ranks = own, columns, numbers, ranks
        self._sizes = ranks.gather(columns.stop - columns.start)

    @property
    def k(self) -> int:
        return self.own.k

    def mix_few(self, coefficients: list[float]) -> Tensor:
        return self._gathered(self.own.mix_few(coefficients)[None])[0]

    def mix(self, coefficients: Tensor) -> Tensor:
        return self._gathered(self.own.mix(coefficients))

    def _gathered(self, own: Tensor) -> Tensor:
        """[m, own columns] → [m, O]."""
        padded = torch.nn.functional.pad(own, (0, max(self._sizes) - own.shape[1]))
        found = self.ranks.gather_rows(padded)
        parts = [part[:, :size] for part, size in zip(found, self._sizes, strict=True)]
        return torch.cat(parts, 1)

    def pull_back(self, gradients: Tensor) -> Tensor:
        return self.ranks.sum(self.own.pull_back(gradients[:, self.columns]))

    def part(self, columns: slice) -> Dense | Deltas:
        """Some of this rank's own columns, numbered as in all."""
        at = self.columns.start
        return self.own.part(slice(columns.start - at, columns.stop - at))
