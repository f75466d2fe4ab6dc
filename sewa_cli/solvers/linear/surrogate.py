"""The outputs y_i of every checkpoint around a base, and the user's loss of their mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sewa_cli.objective.tree import has_rows, tensors
from sewa_cli.solvers.linear.outputs import Outputs
from sewa_cli.trajectory import Trajectory


@dataclass(frozen=True)
class Size:
    """What the cache holds: numbers for each checkpoint, their precision, rows of how many."""

    numbers: int
    dtype: str
    bytes: int
    rows: int
    of_rows: int

    @property
    def has_all_rows(self) -> bool:
        return self.rows == self.of_rows


class Surrogate(Outputs):
    """The outputs y_i of k checkpoints around a base, and the user's loss of their mixtures."""

    def __init__(self, framed: Outputs, base: Tensor, cache: Trajectory, size: Size) -> None:
        super().__init__(framed._objective, framed._run, framed._seed, framed.of_rows)
        self._parts = framed._parts
        self.identity = framed.identity
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

    def _corrected(self, mixed: Tensor) -> Tensor:
        if self._off is not None:
            mixed = mixed - self._off
        return torch.where(self._frozen, self.base, mixed) if self._has_frozen else mixed

    def difference(self, gain: int, lose: int) -> Tensor:
        """y_gain − y_lose [O]."""
        c = [0.0] * self.k
        c[gain], c[lose] = 1.0, -1.0
        return self._cache.mix_few(c)

    def loss_of_mean(self, chosen: Sequence[int]) -> float:
        """Of the predicted outputs of their average."""
        return self.loss(self.mix(mean(chosen, self.k)))

    def loss_and_gradient(self, coefficients: Tensor) -> tuple[float, Tensor]:
        """c [k] → the loss of its predicted outputs, and its gradient in c [k], float64."""
        mixed = self.mix(coefficients)
        gradient = torch.zeros_like(mixed)
        total = 0.0
        for part, share in self._shares():
            with torch.enable_grad():  # one batch's graph at a time
                leaf = mixed[part.where].detach().requires_grad_(True)
                # not the leaf itself: a loss may work in place
                loss = share * self._part_loss(part, leaf.clone())
                self._objective.backward(loss)
            if leaf.grad is not None:
                gradient[part.where] = leaf.grad
            total += float(loss.detach())
        if self._has_frozen:
            gradient = gradient.masked_fill(self._frozen, 0.0)
        return total, self._cache.pull_back(gradient[None])[0].cpu().double()

    def gradients(self, C: Tensor, weights: Tensor) -> Tensor:
        """Of p mixtures C [p, k], each with weights of its own on the rows, [p, O] → [p, k].

        The gradient of a batch's mean has those of its rows, and `weights` makes any other mean of
        them, where the loss splits into rows (`row_weights`), or of batches (`batch_weights`).
        """
        mixed = self._corrected(self._cache.mix(C))
        gradients = torch.zeros_like(mixed)
        for part in self._parts:
            with torch.enable_grad():  # one batch's graph at a time
                leaf = mixed[:, part.where].detach().requires_grad_(True)
                # not the leaf itself: a loss may work in place
                total = torch.stack([self._part_loss(part, one.clone()) for one in leaf]).sum()
                self._objective.backward(total)
            if leaf.grad is not None:
                gradients[:, part.where] = leaf.grad
        gradients.mul_(weights)
        if self._has_frozen:
            gradients.masked_fill_(self._frozen, 0.0)
        return self._cache.pull_back(gradients).cpu().double()

    def batch_weights(self, shares: Tensor) -> Tensor:
        """shares [p, b] of batches in p means → factors [p, O]."""
        sizes = torch.tensor([part.where.stop - part.where.start for part in self._parts])
        return shares.float().repeat_interleave(sizes, 1).to(self.base.device)

    @property
    def is_by_row(self) -> bool:
        """Whether every number of the outputs belongs to a row."""
        return all(
            has_rows(leaf, part.n)
            for part in self._parts
            for leaf in tensors(part.template)
            if leaf.is_floating_point()
        )

    def row_weights(self, shares: Tensor) -> Tensor:
        """shares [p, n] of rows in p means → factors [p, O] for the gradients of batch means."""
        found = torch.empty(len(shares), self.numbers, device=self.base.device)
        for part, share in zip(self._parts, torch.split(shares, self.counts, 1), strict=True):
            at = part.where.start
            for leaf in (x for x in tensors(part.template) if x.is_floating_point()):
                factor = (part.n * share).float().repeat_interleave(leaf.numel() // part.n, 1)
                found[:, at : at + leaf.numel()] = factor.to(found.device)
                at += leaf.numel()
        return found


def mean(chosen: Sequence[int], k: int) -> Tensor:
    """Equal weights on the chosen, [k] float64."""
    c = torch.zeros(k, dtype=torch.float64)
    c[list(chosen)] = 1 / len(chosen)
    return c
