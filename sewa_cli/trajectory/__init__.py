"""The k checkpoints as one matrix W [k, P], and the two products a solver needs of it.

    mix        flat   = a · W       [M, k] · [k, P] → [M, P]
    pull back  grad_a = G · Wᵀ      [M, P] · [P, k] → [M, k]

Two reads of W for each step, whatever M is, and no autograd through W. The rest of the program
knows W only through these two, so where it lives can change:

tiers      float32 in the memory of the device; bfloat16 differences from the mean: half the memory,
           sums in float32; no copy of W: from mapped files, or rows that come from elsewhere
products   on the processor, both by tiles that stay in its caches
placement  which of them, under a cap on memory
geometry   how the checkpoints lie to each other
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.trajectory import products
from sewa_cli.trajectory.products import COPIED

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The place of each floating-point tensor of a model in the flat vector [P].

    Parameters first, then buffers; inside each, tensors of one dtype stand together. Tied tensors
    stand once, under the first of their names.
    """

    slices: dict[str, slice]
    shapes: dict[str, tuple[int, ...]]
    parameters: int  # how many of the P are parameters; buffers come after them
    size: int  # P


class RowSource(Protocol):
    """The checkpoints as rows of W, one at a time, wherever they come from."""

    layout: Layout
    device: torch.device
    count: int

    def fill(self, i: int, row: Tensor) -> bool:
        """Checkpoint i into row [P] float32. False: it holds NaN or Inf, and is left out."""

    @property
    def gather(self) -> Callable[[Sequence[int], slice, Tensor], None] | None:
        """Columns of some checkpoints into [r, c] float32, by any thread; None: only whole rows.

        To be asked for before each product: that nothing has changed is looked at here.
        """


class Trajectory(ABC):
    """W [k, P] on a device. `used`: which of the source's checkpoints its rows are.

    On the processor the products go by tiles (`products`), elsewhere by blocks of whole rows.
    """

    ranks: Ranks = ALONE  # each has other columns of W, and these are this one's
    exact = True  # mixes what the files hold, to float32
    tile_numbers = COPIED  # in a tile on the processor

    def __init__(self, layout: Layout, device: torch.device, used: list[int]) -> None:
        self.layout = layout
        self.device = device
        self.used = used
        self.bytes_moved = 0  # of W as float32, by mixing and pulling back

    @property
    def k(self) -> int:
        return len(self.used)

    @property
    def kind(self) -> str:
        """How it is held: the last bits of products depend on it."""
        return f"{type(self).__name__} {self.device}"

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """W in order, as (rows, float32 [r, P] on the device); a block is valid until the next."""

    @abstractmethod
    def tile(self, rows: slice, columns: slice, scratch: Tensor) -> Tensor:
        """Return a part of W on the processor, float32 [r, c]: a view, or a copy in `scratch`."""

    @property
    def has_tiles(self) -> bool:
        return self.device.type == "cpu"

    @abstractmethod
    def row(self, i: int) -> Tensor:
        """Checkpoint i, float32 [P]; valid until the next."""

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """The checkpoints one by one, (i, float32 [P]); each is valid until the next."""
        self.bytes_moved += 4 * self.k * self.layout.size
        for rows, block in self.blocks():
            yield from zip(range(rows.start, rows.stop), block, strict=True)

    def settled(self, work: Callable[[], T]) -> T:
        """Do work that plans by k and goes over `rows`, which may find fewer checkpoints usable.

        Then it is done again, as it would have been without the others.
        """
        while True:
            planned = self.k
            found = work()
            if self.k == planned:
                return found
            del found  # with what it holds

    def mix(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        """a [M, k] → a·W [M, P], float32 on the device."""
        a = coefficients.to(self.device, torch.float32)
        self.bytes_moved += 4 * self.k * self.layout.size
        if out is None:
            out = torch.empty(a.shape[0], self.layout.size, dtype=torch.float32, device=self.device)
        if self.has_tiles:
            products.mix(self.tile, self.tile_numbers, a, out)
            return out
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
        return self.add_up(chosen, coefficients)

    def add_up(self, chosen: Sequence[int], coefficients: Sequence[float]) -> Tensor:
        """Σ c_i w_i [P] over the chosen rows, one by one."""
        self.bytes_moved += 4 * len(chosen) * self.layout.size
        total = torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)
        for i in chosen:
            total.add_(self.row(i), alpha=coefficients[i])
        return total

    def remember(self, coefficients: Sequence[float], flat: Tensor) -> None:  # noqa: B027
        """An average [P] that was made on the way; of use where W is read anew each time."""

    def pull_back(self, gradients: Tensor) -> Tensor:
        """G [M, Q] → G·W[:, :Q]ᵀ [M, k]; Q ≤ P, as buffers come last and have no gradient.

        Of several ranks, the sum over all.
        """
        return self.ranks.sum(self._pull_back(gradients))

    def _pull_back(self, gradients: Tensor) -> Tensor:
        """Pull back by this rank's columns."""
        G = gradients.to(self.device, torch.float32)
        self.bytes_moved += 4 * self.k * G.shape[1]
        if self.has_tiles:
            return products.pull_back(self.tile, self.tile_numbers, G, self.k)
        pulled = torch.empty(G.shape[0], self.k, dtype=torch.float32, device=self.device)
        for rows, block in self.blocks():
            pulled[:, rows] = G @ block[:, : G.shape[1]].T
        return pulled


def fill_row(
    row: Tensor, tensors: Iterable[tuple[str, Tensor]], layout: Layout, check: bool = True
) -> str | None:
    """Tensors into their places in row [P] float32; the first name with NaN or Inf ends it.

    Checked as float32: a float64 that overflows it is of no use here either. NaN or Inf are in the
    sum too, which is three times as fast; that may overflow without them.
    """
    for name, tensor in tensors:
        segment = row[layout.slices[name]]
        segment.copy_(tensor.reshape(-1))
        if check and not torch.isfinite(segment.sum()) and not torch.isfinite(segment).all():
            return name
    return None
