"""The k checkpoints as one matrix W [k, P], and the two products a solver needs of it.

    mix        flat   = a · W       [M, k] · [k, P] → [M, P]
    pull back  grad_a = G · Wᵀ      [M, P] · [P, k] → [M, k]

Two reads of W for each step, whatever M is, and no autograd through W. The rest of the program
knows W only through these two, so that where it lives can change:

    Trajectory   float32 in the memory of the device
    Deltas       bfloat16 differences from the mean, half the memory, sums in float32
    Streamed     no copy of W: rows come from elsewhere (host memory, files), the next ones
                 fetched while these are worked on
    Remembered   the same, and a few averages that were mixed while the rows went by
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sewa_cli.objective.model import Layout

ROWS = 50  # of W that one product takes: enough to pay for a pass over `out`, few enough for cache


class Trajectory:
    """W float32 [k, P] on `device`."""

    exact = True  # mixes what the files hold, to float32

    def __init__(self, capacity: int, layout: Layout, device: torch.device) -> None:
        """Room for `capacity` checkpoints; fill it with `append`."""
        self.layout = layout
        self.device = device
        self.k = 0
        self.bytes_moved = 0  # of W as float32, by mixing and pulling back
        self._rows = torch.empty(capacity, layout.size, dtype=torch.float32, device=device)

    @property
    def W(self) -> Tensor:
        return self._rows[: self.k]

    def append(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """Copy one checkpoint's tensors into the next row, as float32.

        Returns None, or the name of the first tensor that holds NaN or Inf; the row is then not
        kept, and the next checkpoint takes its place.
        """
        broken = fill_row(self._rows[self.k], tensors, self.layout)
        if broken is None:
            self.k += 1
        return broken

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """W in order, as (rows, float32 [r, P] on the device); a block is valid until the next."""
        for start in range(0, self.k, ROWS):
            rows = slice(start, min(start + ROWS, self.k))
            yield rows, self._rows[rows]

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """The checkpoints one by one, (i, float32 [P]); a row is valid until the next."""
        self.bytes_moved += 4 * self.k * self.layout.size
        for rows, block in self.blocks():
            yield from zip(range(rows.start, rows.stop), block, strict=True)

    def mix(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        """a [M, k] → a·W [M, P], float32 on the device."""
        a = coefficients.to(self.device, torch.float32)
        self.bytes_moved += 4 * self.k * self.layout.size
        if out is None:
            out = torch.empty(a.shape[0], self.layout.size, dtype=torch.float32, device=self.device)
        for rows, block in self.blocks():
            if rows.start == 0:
                torch.mm(a[:, rows], block, out=out)
            else:
                out.addmm_(a[:, rows], block)
        return out

    def mix_few(self, coefficients: Sequence[float]) -> Tensor:
        """Σ c_i w_i [P] over the rows whose coefficient is not zero: only those are read."""
        chosen = [i for i, c in enumerate(coefficients) if c != 0]
        if len(chosen) > self.k // 2:
            return self.mix(torch.tensor([list(coefficients)], dtype=torch.float64))[0]
        self.bytes_moved += 4 * len(chosen) * self.layout.size
        total = torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)
        for i in chosen:
            total.add_(self._row(i), alpha=coefficients[i])
        return total

    def _row(self, i: int) -> Tensor:
        return self._rows[i]

    def pull_back(self, gradients: Tensor) -> Tensor:
        """G [M, Q] → G·W[:, :Q]ᵀ [M, k]; Q ≤ P, as buffers come last and have no gradient."""
        G = gradients.to(self.device, torch.float32)
        self.bytes_moved += 4 * self.k * G.shape[1]
        pulled = torch.empty(G.shape[0], self.k, dtype=torch.float32, device=self.device)
        for rows, block in self.blocks():
            pulled[:, rows] = G @ block[:, : G.shape[1]].T
        return pulled


class Deltas(Trajectory):
    """W as w̄ float32 [P] and differences w_i − w̄ in bfloat16 [k, P].

    Rounding acts on the differences only: an error of 2⁻⁸ of how far a checkpoint is from the
    mean, not of the weights themselves.
    """

    exact = False

    def __init__(self, capacity: int, layout: Layout, device: torch.device, mean: Tensor) -> None:
        self.layout = layout
        self.device = device
        self.k = 0
        self.bytes_moved = 0
        self._mean = mean.to(device, torch.float32)
        self._rows = torch.empty(capacity, layout.size, dtype=torch.bfloat16, device=device)
        # one product's rows at a time become float32 again, always in the same place
        self._few = max(1, min(capacity, ROWS // 5))
        self._wide = torch.empty(self._few, layout.size, dtype=torch.float32, device=device)

    def append(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        row = self._wide[0]
        broken = fill_row(row, tensors, self.layout)
        if broken is None:
            self._rows[self.k].copy_(row.sub_(self._mean))
            self.k += 1
        return broken

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Of the differences."""
        for start in range(0, self.k, self._few):
            rows = slice(start, min(start + self._few, self.k))
            wide = self._wide[: rows.stop - rows.start]
            yield rows, wide.copy_(self._rows[rows])

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        for i, row in super().rows():
            yield i, row.add_(self._mean)

    def mix_few(self, coefficients: Sequence[float]) -> Tensor:
        few = sum(c != 0 for c in coefficients) <= self.k // 2
        total = super().mix_few(coefficients)  # of many: by `mix`, which has the mean in it
        return total.add_(self._mean, alpha=sum(coefficients)) if few else total

    def mix(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ a_i (w̄ + d_i) = (Σ a_i) w̄ + a·D."""
        out = super().mix(coefficients, out)
        total = coefficients.sum(dim=1, keepdim=True).to(self.device, torch.float32)
        return out.addcmul_(total, self._mean)

    def pull_back(self, gradients: Tensor) -> Tensor:
        pulled = super().pull_back(gradients)
        G = gradients.to(self.device, torch.float32)
        return pulled.add_((G @ self._mean[: G.shape[1]])[:, None])


class Streamed(Trajectory):
    """No copy of W. `fill(i, row)` puts checkpoint i into a float32 row [P], wherever it is from.

    Two buffers of `rows` rows: a thread fills one while the products go over the other.
    """

    def __init__(
        self,
        k: int,
        layout: Layout,
        device: torch.device,
        fill: Callable[[int, Tensor], None],
        rows: int = 1,
    ) -> None:
        self.layout = layout
        self.device = device
        self.k = k
        self.bytes_moved = 0
        self._fill = fill
        self._few = max(1, min(rows, k))
        self._buffers = [
            torch.empty(self._few, layout.size, dtype=torch.float32, device=device)
            for _ in range(2)
        ]
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        parts = [slice(i, min(i + self._few, self.k)) for i in range(0, self.k, self._few)]
        ahead: Future[Tensor] = self._fetcher.submit(self._fetch, parts[0], self._buffers[0])
        for n, part in enumerate(parts):
            block = ahead.result()
            if n + 1 < len(parts):
                ahead = self._fetcher.submit(self._fetch, parts[n + 1], self._buffers[(n + 1) % 2])
            yield part, block

    def mix_few(self, coefficients: Sequence[float]) -> Tensor:
        """However many they are, only the chosen ones are read."""
        chosen = [i for i, c in enumerate(coefficients) if c != 0]
        self.bytes_moved += 4 * len(chosen) * self.layout.size
        total = torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)
        for i in chosen:
            self._fill(i, self._buffers[0][0])
            total.add_(self._buffers[0][0], alpha=coefficients[i])
        return total

    def _fetch(self, rows: slice, buffer: Tensor) -> Tensor:
        for position, i in enumerate(range(rows.start, rows.stop)):
            self._fill(i, buffer[position])
        return buffer[: rows.stop - rows.start]


class Remembered(Streamed):
    """`Streamed`, and averages that were made on the way: asked for again, nothing is read."""

    def __init__(
        self,
        k: int,
        layout: Layout,
        device: torch.device,
        fill: Callable[[int, Tensor], None],
        rows: int = 1,
    ) -> None:
        super().__init__(k, layout, device, fill, rows)
        self._known: dict[tuple[float, ...], Tensor] = {}

    def remember(self, coefficients: Sequence[float], flat: Tensor) -> None:
        self._known[tuple(coefficients)] = flat

    def mix_few(self, coefficients: Sequence[float]) -> Tensor:
        known = self._known.get(tuple(coefficients))
        return super().mix_few(coefficients) if known is None else known


def fill_row(row: Tensor, tensors: Iterable[tuple[str, Tensor]], layout: Layout) -> str | None:
    """Tensors into their places in row [P] float32; the first name with NaN or Inf ends it.

    Checked as float32: a float64 that overflows it is of no use here either.
    """
    for name, tensor in tensors:
        segment = row[layout.slices[name]]
        segment.copy_(tensor.reshape(-1))
        if not torch.isfinite(segment).all():
            return name
    return None
