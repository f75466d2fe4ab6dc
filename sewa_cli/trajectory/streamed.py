"""No copy of W: its rows come from elsewhere, each time anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from sewa_cli.trajectory import RowSource, Trajectory


class Streamed(Trajectory):
    """W as its source gives it: in tiles, or whole rows, the next ones fetched meanwhile.

    Which checkpoints are whole is known after the first pass over `rows`; until then all count.
    Averages that were made on the way can be remembered: asked for again, nothing is read.
    """

    def __init__(self, source: RowSource, rows: int = 1, used: list[int] | None = None) -> None:
        super().__init__(source.layout, source.device, used or list(range(source.count)))
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
        self._gather = self._source.gather if super().has_tiles else None
        return self._gather is not None

    def tile(self, rows: slice, columns: slice, scratch: Tensor) -> Tensor:
        self._check()
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

    def _check(self) -> None:
        if not self._checked:
            raise ValueError("go over rows() first: which checkpoints are whole is not known yet")

    def _fill(self, i: int, row: Tensor) -> None:
        self._check()
        self._source.fill(self.used[i], row)

    def mix_few(self, coefficients: Sequence[float]) -> Tensor:
        """However many they are, only the chosen ones are read."""
        known = self._known.get(tuple(coefficients))
        if known is not None:
            return known
        return self.add_up([i for i, c in enumerate(coefficients) if c != 0], coefficients)
