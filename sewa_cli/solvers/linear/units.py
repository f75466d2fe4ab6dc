"""Losses by unit, and the mean loss and its gradient on many samples of the units at once.

A unit is a row, or a group of rows where the task names groups; where the loss is no mean over
rows, whole batches take the place of rows.
"""

from __future__ import annotations

from copy import copy
from math import inf, isfinite
from typing import Literal

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.objective.units import Grouping
from sewa_cli.solvers.linear.outputs import Outputs
from sewa_cli.solvers.linear.pull import Gradient
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.text import or_inf

AT_ONCE = 4_000_000  # numbers of outputs; more problems than fit into them take turns
COPIES = 8  # of these, mixed, differentiated and inside the user's loss


class Units:
    """Units of the selection data, each with its weight in the mean."""

    def __init__(self, outputs: Outputs, at: Tensor) -> None:
        """`at`: outputs [O] of any average, to see whether the loss splits into rows."""
        self._outputs = outputs
        self.by_row = outputs.splits(at) or (outputs.take_apart() and outputs.splits(at))
        self._grouping = Grouping.make(outputs.counts, self.by_row, outputs.groups)
        self.weights = self._grouping.weights

    def by(self, outputs: Outputs) -> Units:
        """The same units, of outputs that are kept in another way."""
        other = copy(self)
        other._outputs = outputs
        return other

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def kind(self) -> Literal["rows", "groups", "batches"]:
        is_grouped = len(self) < len(self._grouping.of)
        return "batches" if not self.by_row else "groups" if is_grouped else "rows"

    @property
    def independent(self) -> int:
        """How many groups there are; without them, how many rows."""
        groups = self._outputs.groups
        return int(self.weights.sum()) if groups is None else int(groups.max()) + 1

    def mean(self, losses: Tensor) -> float:
        """Of losses [units]; what is not finite is behind all else."""
        return or_inf(float(losses @ self.weights / self.weights.sum()))

    def mean_on(self, losses: Tensor, members: Tensor) -> Tensor:
        """Of losses [units], over some of them."""
        return losses[members] @ self.weights[members] / self.weights[members].sum()

    def losses(self, outputs: Tensor) -> Tensor:
        """outputs [O] → the loss of each unit, [units] float64; Inf if their mean is not finite."""
        if not self.by_row:
            return self._grouping.means(self._outputs.batch_losses(outputs))
        found = self._outputs.unit_losses(outputs)
        if found is None and not isfinite(self._outputs.loss(outputs)):
            return torch.full_like(self.weights, inf)
        if found is None:
            raise TaskError("loss() splits into rows at one average and not at another")
        return self._grouping.means(found)

    def losses_of(self, surrogate: Surrogate, C: Tensor) -> Tensor:
        """Predicted, of mixtures C [m, k], [m, units] float64."""
        if surrogate.outputs.adds_up:
            found = self._grouping.means(surrogate.row_losses(C))
            return torch.where(torch.isfinite(found.sum(1, keepdim=True)), found, inf)
        return torch.stack([self.losses(surrogate.mix(c)) for c in C])

    def on(self, surrogate: Surrogate, chosen: Tensor) -> Surrogate:
        """The surrogate on some of the units, [units] bool."""
        parts = self._grouping.spread(chosen)
        return surrogate.on(parts) if self.by_row else surrogate.on_batches(parts)

    def side_by_side(self, surrogate: Surrogate) -> int:
        """How many samples of the units, whose factors are held as numbers of outputs."""
        return max(1, AT_ONCE // surrogate.outputs.numbers)

    def gradient_on(self, surrogate: Surrogate, members: Tensor, room: int) -> Gradient:
        """members [p, units] → C [p, k] ↦ the gradients of p losses, [p, k] float64.

        The p-th is the mean over the p-th sample of the units: which are in it, or how often.
        `room`: bytes to work in.
        """
        outputs, members = surrogate.outputs, self._grouping.spread(members)
        at_once = max(1, min(AT_ONCE, room // (4 * COPIES)) // outputs.block)
        parts = torch.split(torch.arange(len(members)), at_once)
        shares = members.double() * self._grouping.sizes
        shares = shares / shares.sum(1, keepdim=True)
        if self.by_row and not outputs.is_by_row:
            # some outputs belong to no row: the loss is called on just those rows
            return lambda C: torch.stack(
                [
                    surrogate.on(member).loss_and_gradient(c)[1]
                    for member, c in zip(members, C, strict=True)
                ]
            )
        factors = [outputs.factors(shares[some], self.by_row) for some in parts]
        return lambda C: torch.cat(
            [surrogate.gradients(C[p], f) for p, f in zip(parts, factors, strict=True)]
        )
