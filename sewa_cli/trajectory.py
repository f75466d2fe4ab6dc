"""The k checkpoints as one matrix W [k, P], and the two products a solver needs of it.

    mix        flat   = a · W       [M, k] · [k, P] → [M, P]
    pull back  grad_a = G · Wᵀ      [M, P] · [P, k] → [M, k]

Two reads of W for each step, whatever M is, and no autograd through W. The rest of the program
knows W only through these two, so that where it lives can change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sewa_cli.flat import Layout


class Trajectory:
    def __init__(self, capacity: int, layout: Layout, device: torch.device) -> None:
        """Room for `capacity` checkpoints; fill it with `append`."""
        self.layout = layout
        self._rows = torch.empty(capacity, layout.size, dtype=torch.float32, device=device)
        self._count = 0
        self.bytes_moved = 0  # of W, by mixing and pulling back

    @staticmethod
    def bytes_needed(k: int, layout: Layout) -> int:
        return 4 * k * layout.size

    @property
    def k(self) -> int:
        return self._count

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def W(self) -> Tensor:
        return self._rows[: self._count]

    def append(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """Copy one checkpoint's tensors into the next row, as float32.

        Returns None, or the name of the first tensor that holds NaN or Inf; the row is then not
        kept, and the next checkpoint takes its place.
        """
        row = self._rows[self._count]
        for name, tensor in tensors:
            segment = row[self.layout.slices[name]]
            segment.copy_(tensor.reshape(-1))
            # checked as float32: a float64 that overflows it is of no use here either
            if not torch.isfinite(segment).all():
                return name
        self._count += 1
        return None

    def mix(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        """a [M, k] → a·W [M, P], float32 on W's device."""
        self.bytes_moved += 4 * self.W.numel()
        return torch.mm(coefficients.to(self.device, torch.float32), self.W, out=out)

    def pull_back(self, gradients: Tensor) -> Tensor:
        """G [M, Q] → G·W[:, :Q]ᵀ [M, k]; Q ≤ P, as buffers come last and have no gradient."""
        gradients = gradients.to(self.device, torch.float32)
        self.bytes_moved += 4 * self.k * gradients.shape[1]
        return torch.mm(gradients, self.W[:, : gradients.shape[1]].T)
