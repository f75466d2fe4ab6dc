"""The outputs y_i of every checkpoint around a base, and the loss of their mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sewa_cli import ranks
from sewa_cli.solvers.linear.outputs import Outputs
from sewa_cli.solvers.linear.spread import Spread
from sewa_cli.trajectory.deltas import Deltas
from sewa_cli.trajectory.dense import Dense

AT_ONCE = 2**20  # numbers of outputs of all mixtures together, where the loss is in closed form


@dataclass(frozen=True)
class Size:
    """What the cache holds: numbers for each checkpoint, their precision, rows of how many."""

    numbers: int
    dtype: str
    bytes: int
    rows: int
    of_rows: int


class Surrogate:
    """The outputs y_i of k checkpoints around a base, and the loss of their mixtures.

    `outputs` says what their numbers mean, and what is true of other weights.
    """

    def __init__(
        self, outputs: Outputs, base: Tensor, cache: Dense | Deltas | Spread, size: Size
    ) -> None:
        self.outputs = outputs
        self.base = base  # f(b) [O]: the true outputs of the base
        self.size = size
        self._cache = cache
        self._frozen = ~torch.isfinite(base)  # -Inf of a masked logit, say: no direction changes it
        self._has_frozen = bool(self._frozen.any())
        self._off: Tensor | None = None  # how far the mixture that is the base is predicted off

    @property
    def k(self) -> int:
        return self._cache.k

    def centre(self, coefficients: Tensor) -> None:
        """Let the outputs of the base be exact; `coefficients` [k] are those of its own mixture.

        A step of finite length sees the model's curvature, (h/2)·Σ c_i f″[w_i − b], which hardly
        depends on c: every mixture is predicted off by nearly as much.
        """
        self._off = None
        self._off = self.mix(coefficients) - torch.where(self._frozen, 0.0, self.base)
        self._off.masked_fill_(self._frozen, 0.0)

    def mix(self, coefficients: Tensor) -> Tensor:
        """c [k] → Σ c_i y_i [O]; they sum to one."""
        return self._corrected(self._cache.mix_few(coefficients.tolist()))

    def _corrected(self, mixed: Tensor, columns: slice = slice(None)) -> Tensor:
        """Mixtures [O], or some columns of many."""
        if self._off is not None:
            mixed = mixed - self._off[columns]
        if not self._has_frozen:
            return mixed
        return torch.where(self._frozen[columns], self.base[columns], mixed)

    def difference(self, gain: int, lose: int) -> Tensor:
        """y_gain − y_lose [O]."""
        c = [0.0] * self.k
        c[gain], c[lose] = 1.0, -1.0
        return self._cache.mix_few(c)

    def loss(self, outputs: Tensor) -> float:
        """Of outputs [O], predicted or true."""
        return self.outputs.loss(outputs)

    def true_loss(self, flat: Tensor) -> float:
        """Of weights [P]."""
        return self.loss(self.outputs.at(flat))

    def loss_of_mean(self, chosen: Sequence[int]) -> float:
        """Of the predicted outputs of their average."""
        return self.loss(self.mix(mean(chosen, self.k)))

    def loss_and_gradient(self, coefficients: Tensor) -> tuple[float, Tensor]:
        """c [k] → the loss of its predicted outputs, and its gradient in c [k], float64."""
        loss, gradient = self.outputs.loss_and_gradient(self.mix(coefficients))
        if self._has_frozen:
            gradient = gradient.masked_fill(self._frozen, 0.0)
        return loss, self._cache.pull_back(gradient[None])[0].cpu().double()

    def gradients(self, C: Tensor, factors: Tensor, at_once: int = AT_ONCE) -> Tensor:
        """Of p mixtures C [p, k], each on rows of its own (`outputs.factors`), [p, k] float64.

        `at_once`: numbers of outputs, of all mixtures together.
        """
        total = torch.zeros(C.shape, dtype=torch.float64)
        for columns, part in self._blocks(at_once // len(C)):
            mixed = self._corrected(part.mix(C), columns)
            gradients = self.outputs.gradients(mixed, columns, factors)
            if self._has_frozen:
                gradients.masked_fill_(self._frozen[columns], 0.0)
            total += part.pull_back(gradients).cpu().double()
        return self._of_all(total)

    def row_losses(self, C: Tensor, at_once: int = AT_ONCE) -> Tensor:
        """Of mixtures C [m, k], where they add up over blocks: [m, n] float64."""
        total = torch.zeros(len(C), sum(self.outputs.counts), dtype=torch.float64)
        for columns, part in self._blocks(at_once // len(C)):
            total += self.outputs.row_losses(self._corrected(part.mix(C), columns), columns)
        return self._of_all(total)

    @property
    def _is_apart(self) -> bool:
        """Whether each rank has blocks of its own, so that sums over all are sums of theirs."""
        return isinstance(self._cache, Spread) and self.outputs.adds_up

    def _of_all(self, total: Tensor) -> Tensor:
        return ranks.here().sum(total) if self._is_apart else total

    def _blocks(self, width: int) -> Iterator[tuple[slice, Dense | Deltas | Spread]]:
        """The cache in parts of so many columns, or one block of the outputs at least."""
        numbers, block = self.outputs.numbers, self.outputs.block
        width = max(width // block, 1) * block
        here = self._cache.columns if self._is_apart else slice(0, numbers)  # type: ignore[union-attr]
        for start in range(here.start, here.stop, width):
            columns = slice(start, min(start + width, here.stop))
            whole = columns == slice(0, numbers)
            yield columns, self._cache if whole else self._cache.part(columns)

    def on(self, times: Tensor) -> Self:
        """The same on a sample of the rows: each as often as `times` [n] says."""
        return self._with(self.outputs.on(times))

    def on_batches(self, chosen: Tensor) -> Self:
        """On some of the batches, [b] bool."""
        return self._with(self.outputs.on_batches(chosen))

    def _with(self, outputs: Outputs) -> Self:
        other = copy(self)
        other.outputs = outputs
        return other


def mean(chosen: Sequence[int], k: int) -> Tensor:
    """Equal weights on the chosen, [k] float64."""
    c = torch.zeros(k, dtype=torch.float64)
    c[list(chosen)] = 1 / len(chosen)
    return c
