"""W as bfloat16 differences from the mean: half the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sewa_cli.dtypes import as_array
from sewa_cli.trajectory import Layout, RowSource, Trajectory, products
from sewa_cli.trajectory.products import VIEWED

ROWS = 10  # of a block on a device


def rows_at_once(k: int, device: torch.device) -> int:
    """Rows of a block: each is widened to float32 in a buffer of that size."""
    return 1 if device.type == "cpu" else max(1, min(k, ROWS))


class Deltas(Trajectory):
    """W as w̄ float32 [P] and differences w_i − w̄ in bfloat16 [k, P].

    Rounding acts on the differences only: an error of 2⁻⁸ of how far a checkpoint is from the
    mean, not of the weights themselves.
    """

    exact = False

    def __init__(
        self, mean: Tensor, differences: Tensor, layout: Layout, used: list[int] | None = None
    ) -> None:
        k = len(differences)
        super().__init__(layout, differences.device, list(range(k)) if used is None else used)
        self._mean = mean.to(differences.device)
        self._differences = differences
        # of bfloat16 NumPy widens a tile faster than torch
        self._array = as_array(differences) if differences.device.type == "cpu" else None
        shape = (rows_at_once(k, differences.device), layout.size)
        self._wide = torch.empty(shape, dtype=torch.float32, device=differences.device)

    @classmethod
    def read(cls, source: RowSource) -> Deltas:
        """Every whole checkpoint is read twice: for the mean, and for its difference from it."""
        row = torch.empty(source.layout.size, dtype=torch.float32)
        total, used = torch.zeros_like(row), []
        for i in range(source.count):
            if source.fill(i, row):
                used.append(i)
                total += row
        mean = total / max(len(used), 1)
        shape = (len(used), source.layout.size)
        differences = torch.empty(shape, dtype=torch.bfloat16, device=source.device)
        for position, i in enumerate(used):
            source.fill(i, row)
            differences[position].copy_(row.sub_(mean))
        return cls(mean, differences, source.layout, used)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the differences in float32."""
        few = len(self._wide)
        for start in range(0, self.k, few):
            rows = slice(start, min(start + few, self.k))
            wide = self._wide[: rows.stop - rows.start]
            yield rows, wide.copy_(self._differences[rows])

    def tile(self, rows: slice, columns: slice, scratch: Tensor) -> Tensor:
        """Return differences, widened where the cache holds them."""
        assert self._array is not None
        narrow = self._array[rows, columns]
        wide = scratch[: narrow.shape[0], : narrow.shape[1]]
        wide.numpy()[...] = narrow
        return wide

    def row(self, i: int) -> Tensor:
        return self._differences[i].float().add_(self._mean)

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        for i, row in super().rows():
            yield i, row.add_(self._mean)

    def add_up(self, chosen: Sequence[int], coefficients: Sequence[float]) -> Tensor:
        self.bytes_moved += 4 * len(chosen) * self.layout.size
        total = torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)
        for i in chosen:
            total.add_(self._differences[i], alpha=coefficients[i])
        return total.add_(self._mean, alpha=sum(coefficients))

    def mix(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ a_i (w̄ + d_i) = (Σ a_i) w̄ + a·D."""
        out = super().mix(coefficients, out)
        total = coefficients.sum(dim=1, keepdim=True).to(self.device, torch.float32)
        return out.addcmul_(total, self._mean)

    def _pull_back(self, gradients: Tensor) -> Tensor:
        pulled = super()._pull_back(gradients)
        G, mean = gradients.to(self.device, torch.float32), self._mean[None]
        if not self.has_tiles:
            return pulled.add_(G @ mean[:, : G.shape[1]].T)
        return pulled.add_(products.pull_back(lambda rows, at, _: mean[rows, at], VIEWED, G, 1))
