"""W in float32, in the memory of the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sewa_cli.trajectory import Layout, RowSource, Trajectory
from sewa_cli.trajectory.products import VIEWED

ROWS = 50  # of a block, where products go by blocks


class Dense(Trajectory):
    """W float32 [k, P] on its device."""

    tile_numbers = VIEWED

    def __init__(self, W: Tensor, layout: Layout, used: list[int] | None = None) -> None:
        super().__init__(layout, W.device, list(range(len(W))) if used is None else used)
        self.W = W

    @classmethod
    def read(cls, source: RowSource, device: torch.device | None = None) -> Dense:
        """Every checkpoint of the source that holds no NaN or Inf."""
        device, P = device or source.device, source.layout.size
        W = torch.empty(source.count, P, dtype=torch.float32, device=device)
        used: list[int] = []
        for i in range(source.count):
            if source.fill(i, W[len(used)]):  # a broken one is overwritten by the next
                used.append(i)
        return cls(W[: len(used)], source.layout, used)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.k, ROWS):
            rows = slice(start, min(start + ROWS, self.k))
            yield rows, self.W[rows]

    def tile(self, rows: slice, columns: slice, scratch: Tensor) -> Tensor:  # noqa: ARG002
        return self.W[rows, columns]

    def row(self, i: int) -> Tensor:
        return self.W[i]
