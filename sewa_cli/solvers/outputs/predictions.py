"""The outputs of every checkpoint around a base, and the loss of their mixtures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sewa_cli.errors import CheckpointError
from sewa_cli.objective.memo import Key, Tensors
from sewa_cli.objective.units import Grouping
from sewa_cli.report.findings import Predicted
from sewa_cli.solvers import Problem

# float32 vectors of length O next to the matrix: outputs at the base, what is added to mixtures,
# and mixtures of one piece with their gradients, of which there may be only one
SPARE = 12
Gradient = Callable[[Tensor], Tensor]  # C [p, k] → gradients of p losses, [p, k]


@dataclass(frozen=True)
class Piece(ABC):
    """Neighbouring parts of the examples, and the columns of [O] with their outputs.

    A part is what the loss is known of: an example, or a batch where the loss does not split.
    """

    columns: slice
    parts: slice

    @abstractmethod
    def losses(self, mixed: Tensor) -> Tensor:
        """Return the loss of each part, [m, parts] float64, of outputs [m, columns]."""

    @abstractmethod
    def totals(self, mixed: Tensor) -> Tensor:
        """Return the sum of losses over all examples of the piece, [m] float64."""

    @abstractmethod
    def gradients(self, mixed: Tensor, shares: Tensor) -> Tensor:
        """Return the gradients of Σ shares · losses, [m, columns]; shares [m, parts]."""


@dataclass(frozen=True)
class KeptOutputs(ABC):
    """The outputs that are kept, one vector [O] in pieces; `identity` names them for the memo."""

    pieces: Sequence[Piece]
    identity: str

    @property
    def numbers(self) -> int:
        """Return O."""
        return int(self.pieces[-1].columns.stop)

    @abstractmethod
    def run(self) -> Tensor:
        """Return the outputs [O] of the weights in the model."""


@dataclass(frozen=True)
class Predictions:
    """Differences d_i of outputs from those at the base, [k, O], and the loss of mixtures.

    shift     [O]: added to a mixture, so that the base's own mixture is exact: a step of finite
              length sees the model's curvature, which is nearly the same in every mixture
    frozen    [O]: not finite at the base, as a masked logit is; no direction changes it
    grouping  the units of the examples
    weights   the number of examples in each, [units]
    """

    kept: KeptOutputs
    differences: Tensor
    shift: Tensor
    frozen: Tensor
    grouping: Grouping
    size: Predicted
    weights: Tensor

    @property
    def k(self) -> int:
        return len(self.differences)

    def losses(self, C: Tensor) -> Tensor:
        """Return the loss of each unit, [m, units] float64, of mixtures C [m, k]; never NaN."""
        found = [piece.losses(self._mix(C, piece)) for piece in self.kept.pieces]
        return self.grouping.means(torch.cat(found, 1)).nan_to_num(nan=torch.inf)

    def means(self, C: Tensor) -> Tensor:
        """Return the mean loss [m] of mixtures C [m, k]; never NaN."""
        total = torch.zeros(len(C), dtype=torch.float64)
        for piece in self.kept.pieces:
            total += piece.totals(self._mix(C, piece))
        return (total / self.weights.sum()).nan_to_num(nan=torch.inf)

    def gradient_on(self, members: Tensor) -> Gradient:
        """Return the gradient of p mean losses, each on the units in members [p, units]."""
        sizes = members[:, self.grouping.of] * self.grouping.sizes
        shares = sizes / sizes.sum(1, keepdim=True)
        return lambda C: self._gradients(C, shares)

    def loss(self, c: Tensor) -> float:
        return float(self.means(c[None])[0])

    def loss_and_gradient(self, c: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of c [k] and its gradient [k], but for a constant."""
        everything = torch.ones(1, len(self.weights), dtype=torch.bool)
        return self.loss(c), self.gradient_on(everything)(c[None])[0]

    def _gradients(self, C: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros(C.shape, dtype=torch.float64)
        for piece in self.kept.pieces:
            found = piece.gradients(self._mix(C, piece), shares[:, piece.parts])
            found.masked_fill_(self.frozen[piece.columns], 0.0)
            total += (found @ self.differences[:, piece.columns].float().T).cpu().double()
        return total

    def _mix(self, C: Tensor, piece: Piece) -> Tensor:
        differences = self.differences[:, piece.columns].float()
        return C.to(differences) @ differences + self.shift[piece.columns]


def predict(
    problem: Problem,
    kept: KeptOutputs,
    at_base: Tensor,
    base: Tensor,
    coefficients: Tensor,
    grouping: Grouping,
    h: float,
    of_rows: int,
    on_row: Callable[[int, Tensor], None],
) -> Predictions:
    """Run the model once near each of the k checkpoints, in their order.

    `base` [P] has these `coefficients` and outputs `at_base` [O]. The differences are kept in
    float32 if that fits, else in bfloat16. `on_row` sees each checkpoint as it is read. What the
    memo has is not run.
    """
    objective, k = problem.objective, problem.trajectory.k
    model, memo = objective.model, objective.memo
    wide = bytes_of(k, kept.numbers, torch.float32) <= problem.memory_left
    dtype = torch.float32 if wide else torch.bfloat16
    differences = torch.empty(k, kept.numbers, dtype=dtype, device=model.device)
    frozen = ~torch.isfinite(at_base)
    key: Key = ()
    if memo is not None:
        key = "near", problem.trajectory.kind, memo.digest(base), kept.identity, h, str(dtype)
    step = torch.empty_like(base)
    model.module.eval()

    def near(i: int, row: Tensor) -> Tensors:
        torch.lerp(base, row.to(base.device), h, out=step)
        model.set(step)
        found = kept.run().sub_(at_base).div_(h).masked_fill_(frozen, 0.0)
        if not torch.isfinite(found).all():
            name = problem.name_of(i)
            raise CheckpointError(f"the outputs near {name} are NaN or Inf; leave it out")
        return {"": found.to(dtype)}

    problem.events.progress("outputs", 0, k)
    for i, row in problem.trajectory.rows():
        on_row(i, row)
        differences[i].copy_(objective.recall((*key, i), partial(near, i, row))[""])
        problem.events.progress("outputs", i + 1, k)
    model.check_untouched()
    shift = at_base.clone()
    for piece in kept.pieces:
        own = differences[:, piece.columns].float()
        shift[piece.columns] -= coefficients.to(own) @ own
    size = Predicted(
        numbers=kept.numbers,
        dtype=str(dtype).removeprefix("torch."),
        bytes=bytes_of(k, kept.numbers, dtype),
        rows=int(grouping.sizes.sum()),
        of_rows=of_rows,
    )
    return Predictions(kept, differences, shift, frozen, grouping, size, grouping.weights)


def bytes_of(k: int, numbers: int, dtype: torch.dtype) -> int:
    """Return the bytes of these numbers for each of k checkpoints, and of the work on them."""
    return numbers * (k * dtype.itemsize + 4 * SPARE)


def mean(chosen: Sequence[int], k: int) -> Tensor:
    """Return equal coefficients on the chosen, [k] float64."""
    c = torch.zeros(k, dtype=torch.float64)
    c[list(chosen)] = 1 / len(chosen)
    return c
