"""W in memory, as float32 or half of that; or no copy of it, rows that come each time anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from sewa_cli.dtypes import as_array
from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.trajectory import Layout, RowSource, Trajectory, products
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


UNREAD = "go over rows() first: which checkpoints are whole is not known yet"
DEVICE_ROWS = 10  # of a block on a device


def rows_at_once(k: int, device: torch.device) -> int:
    """Rows of a block: each is widened to float32 in a buffer of that size."""
    return 1 if device.type == "cpu" else max(1, min(k, DEVICE_ROWS))


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


class Streamed(Trajectory):
    """W as its source gives it: in tiles, or whole rows, the next ones fetched meanwhile.

    Which checkpoints are whole is known after the first pass over `rows`; until then all count.
    Averages that were made on the way can be remembered: asked for again, nothing is read.
    """

    def __init__(
        self, source: RowSource, rows: int = 1, used: list[int] | None = None, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(source.layout, source.device, used or list(range(source.count)))
        self.ranks = ranks
        self._source = source
        self._checked = used is not None
        self._known: dict[tuple[float, ...], Tensor] = {}
        self._rows = max(1, min(rows, self.k))
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")

    @classmethod
    def read(cls, source: RowSource, rows: int) -> Streamed:
        """Read once, to see which checkpoints are whole."""
        row = torch.empty(source.layout.size, dtype=torch.float32)
        return cls(source, rows, [i for i in range(source.count) if source.fill(i, row)])

    def remember(self, coefficients: Sequence[float], flat: Tensor) -> None:
        self._known[tuple(coefficients)] = flat

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        if self._checked:
            yield from super().rows()
            return
        # in order and without a thread, as broken checkpoints are found here
        used: list[int] = []
        self.bytes_moved += 4 * self.k * self.layout.size
        row = torch.empty(self.layout.size, dtype=torch.float32)
        for i in range(self._source.count):
            if all(self.ranks.gather(self._source.fill(i, row))):
                used.append(i)
                yield len(used) - 1, row.to(self.device)
        self.used, self._checked = used, True

    @cached_property
    def _buffers(self) -> list[Tensor]:
        """Return buffers for whole rows; products from mapped files need none."""
        shape = (self._rows, self.layout.size)
        return [torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(2)]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        few = self._rows
        parts = [slice(i, min(i + few, self.k)) for i in range(0, self.k, few)]
        if not parts:
            return
        ahead: Future[Tensor] = self._fetcher.submit(self._fetch, parts[0], self._buffers[0])
        for n, part in enumerate(parts):
            block = ahead.result()
            if n + 1 < len(parts):
                ahead = self._fetcher.submit(self._fetch, parts[n + 1], self._buffers[(n + 1) % 2])
            yield part, block

    @property
    def has_tiles(self) -> bool:
        """Asked once for each product, when no thread has begun: the source looks at its files."""
        if not self._checked:
            raise ValueError(UNREAD)
        self._gather = self._source.gather if self.device.type == "cpu" else None
        return self._gather is not None

    def tile(self, rows: slice, columns: slice, scratch: Tensor) -> Tensor:
        assert self._gather is not None
        out = scratch[: rows.stop - rows.start, : columns.stop - columns.start]
        self._gather(self.used[rows], columns, out)
        return out

    def _fetch(self, rows: slice, buffer: Tensor) -> Tensor:
        for position, i in enumerate(range(rows.start, rows.stop)):
            self._fill(i, buffer[position])
        return buffer[: rows.stop - rows.start]

    def row(self, i: int) -> Tensor:
        self._fill(i, self._buffers[0][0])
        return self._buffers[0][0]

    def _fill(self, i: int, row: Tensor) -> None:
        if not self._checked:
            raise ValueError(UNREAD)
        self._source.fill(self.used[i], row)

    def mix_few(self, coefficients: Sequence[float]) -> Tensor:
        """However many they are, only the chosen ones are read."""
        known = self._known.get(tuple(coefficients))
        if known is not None:
            return known
        return self.add_up([i for i, c in enumerate(coefficients) if c != 0], coefficients)
