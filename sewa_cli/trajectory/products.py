"""The two products with W on the processor, by tiles and on all cores, with the same bytes.

    mix        out[:, c] = Σ_r a[:, r] · W[r, c]       a [M, k] → [M, P]
    pull back  pulled[:, r] = Σ_c G[:, c] · W[r, c]ᵀ   G [M, Q] → [M, k]

A tile is a few rows of W and so many columns that it, and its part of `out` or G, stay in a core's
own cache. One thread multiplies a tile, and which tiles there are is a matter of shapes alone: sums
are made in one order, so the bytes are the same however many threads there are. What BLAS makes of
the whole matrix with threads of its own is slower besides: on an Intel Xeon, k = 100, P = 2·10⁶, in
plain reads of W: mixing 1.7 and pulling back 1.6 with M = 1 (tiles: 0.9, 0.9), 1.9 and 4.6 with
M = 4 (tiles: 1.1, 1.7).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import local

import numpy as np
import torch
from torch import Tensor

COLUMNS = 2**15  # of a tile; twice as many if it is copied: each row is a call from Python; but
TILES = 16  # at least, so that no core waits long for the others, and
WORTHWHILE = 2**20  # numbers in it at least: its overhead is some ten microseconds
FEWEST_COLUMNS, MOST_COLUMNS = 2**10, 2**18
ALONE = 2**21  # numbers in W that one core is done with before another is awake
VIEWED = 50 * COLUMNS  # numbers in a tile that is a view of W
COPIED = 16 * COLUMNS  # in a tile that is copied: 2 MiB, which fits into the cache of a core

# rows, columns, scratch [≥ r, c] → that part of W as float32 [r, c]: a view, or in the scratch
Tile = Callable[[slice, slice, Tensor], Tensor]
_own = local()


def mix(tile: Tile, numbers: int, a: Tensor, out: Tensor) -> None:
    """Mix a [M, k] float32 into out [M, P]; `numbers` in a tile."""
    tiles = _tiles(a.shape[1], out.shape[1], numbers)

    def work(columns: slice, scratch: Tensor) -> None:
        part = out[:, columns]
        for some in _steps(a.shape[1], max(1, numbers // (columns.stop - columns.start))):
            W = tile(some, columns, scratch)
            if some.start > 0:
                part.addmm_(a[:, some], W)
            else:
                torch.mm(a[:, some], W, out=part)

    _over(tiles, work, a.shape[1])


def pull_back(tile: Tile, numbers: int, G: Tensor, k: int) -> Tensor:
    """Pull G [M, Q] float32 back to [M, k]; `numbers` in a tile."""
    M, Q = G.shape
    tiles = _tiles(k, Q, numbers)
    sums = torch.empty(len(tiles), M, k, dtype=torch.float32)

    def work(columns: slice, scratch: Tensor) -> None:
        part, total = G[:, columns], sums[columns.start // tiles[0].stop]
        for some in _steps(k, max(1, numbers // (columns.stop - columns.start))):
            torch.mm(part, tile(some, columns, scratch).T, out=total[:, some])

    _over(tiles, work, k)
    # thousands of tiles: their sum is not to lose digits; NumPy's has one order
    return torch.from_numpy(sums.numpy().sum(0, dtype=np.float64).astype(np.float32))


def _steps(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def _tiles(k: int, P: int, numbers: int) -> list[slice]:
    """Columns of each; all as many but the last. They depend on W alone: its shape and its kind."""
    widest = COLUMNS if numbers == VIEWED else 2 * COLUMNS
    columns = max(min(widest, -(-P // TILES)), WORTHWHILE // k)
    return _steps(P, min(max(columns, FEWEST_COLUMNS), MOST_COLUMNS))


def _over(tiles: list[slice], work: Callable[[slice, Tensor], None], k: int) -> None:
    """Every tile's columns once, by as many threads as torch would use."""
    threads, left = torch.get_num_threads(), iter(tiles)

    def take() -> None:
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        if not hasattr(_own, "scratch"):
            _own.scratch = torch.empty(COPIED, dtype=torch.float32)
        try:
            # which each thread must say for itself; what is infinite is the caller's to find
            with torch.no_grad(), np.errstate(all="ignore"):
                for columns in left:
                    width = columns.stop - columns.start
                    rows = COPIED // width
                    work(columns, _own.scratch[: rows * width].view(rows, width))
        except BaseException:
            _use_up(left)
            raise

    others = 0 if k * tiles[-1].stop < ALONE else min(threads, len(tiles)) - 1
    begun = [_pool(threads).submit(take) for _ in range(others)]
    try:
        take()  # while the others wake up
        for other in begun:
            other.result()  # what it raised is raised here
    except BaseException:  # an interrupt: no more than the tiles in hand
        _use_up(left)
        wait(begun)
        raise
    finally:
        if threads > 1:  # each thread has its own, but later ones take what was set last
            torch.set_num_threads(threads)


def _use_up(left: Iterator[slice]) -> None:
    for _ in left:
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="products")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
