"""A model's outputs on the selection data as one vector [O], and the loss of such vectors.

The rows of the data are kept with them, so that the loss can be taken on any sample of the rows:
on a fold, or on rows drawn with repetition. `whole.Whole` has all outputs and calls the user's
loss; `digest.Digest` has a few numbers for each target of a cross-entropy, whose loss it knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor

from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import Nest
from sewa_cli.objective.units import Grouping

MIXINGS = 39  # of the rows; by luck, one in forty is below all of them
ENOUGH_MIXINGS = 20  # that change anything; fewer prove nothing

SURE = 2.0  # standard errors by which outputs that know nothing of their row must do better

# what the labels say: something; what outputs are like as a whole, but not of single rows; nothing;
# or the loss does not look at the batch at all
Labels = Literal["matter", "weak", "noise", "unseen"]
WEAK = (
    "the loss on the selection data is no better than with their rows mixed up: they tell averages "
    "apart by outputs as a whole, not row by row"
)
NOISE = (
    "the loss on the selection data is no better than with their rows mixed up, so the labels say "
    "nothing about these checkpoints"
)
UNSEEN = (
    "loss() gives the same value whatever rows the batch has: if the model computes its own loss, "
    "return its outputs from predict() and compute the loss in loss(), or predictions mean little"
)
WARNINGS: dict[Labels, str] = {"weak": WEAK, "noise": NOISE, "unseen": UNSEEN}


class Outputs(ABC):
    """What a vector [O] of outputs on the selection data means, and what its loss is."""

    def __init__(self, objective: Objective, seed: int, of_rows: int) -> None:
        """`of_rows`: how many rows the data have; not all need take part."""
        self.of_rows = of_rows
        self.identity = ""  # of the rows, for the memo
        self._objective = objective
        self._seed = seed

    @property
    @abstractmethod
    def numbers(self) -> int:
        """O."""

    @property
    @abstractmethod
    def counts(self) -> list[int]:
        """Rows of each batch that the loss is taken on."""

    @property
    @abstractmethod
    def batches(self) -> list[Nest]:
        """The examples that take part, in batches as the user made them."""

    @cached_property
    def groups(self) -> Tensor | None:
        """The number of each example's group, [n]; None: each example stands for itself."""
        return self._objective.groups(self.batches)

    # ---- of a model ----------------------------------------------------------------------------

    def at(self, flat: Tensor) -> Tensor:
        """Of the weights [P], [O]."""
        self._objective.model.set(flat)
        return self.true_outputs()

    def true_outputs(self) -> Tensor:
        """Of the weights that are in the model now, [O]: their loss is the true one.

        Run, or known from before.
        """
        memo, model = self._objective.memo, self._objective.model
        key = ("outputs", self.identity, *model.weights)
        return memo.recall(key, self.run).to(model.device)

    @abstractmethod
    def run(self) -> Tensor:
        """The same, run in any case."""

    @abstractmethod
    def around(self, flat: Tensor) -> tuple[Outputs, Tensor]:
        """The same rows for a cache around these weights [P], and the true outputs there."""

    @abstractmethod
    def linear_outputs(self) -> Tensor:
        """Of the weights in the model, [O]: linear in what the model puts out."""

    # ---- losses --------------------------------------------------------------------------------

    @abstractmethod
    def loss(self, outputs: Tensor) -> float:
        """Of outputs [O], a mean over the rows."""

    @abstractmethod
    def loss_and_gradient(self, outputs: Tensor) -> tuple[float, Tensor]:
        """Of outputs [O], and its gradient in them, [O]."""

    @abstractmethod
    def unit_losses(self, outputs: Tensor) -> Tensor | None:
        """The loss of each row alone [n] float64; None if the loss does not split into rows."""

    @abstractmethod
    def batch_losses(self, outputs: Tensor) -> Tensor:
        """The loss of each batch [b] float64."""

    @abstractmethod
    def splits(self, outputs: Tensor) -> bool:
        """Whether some rows of a batch are a batch: the losses of its halves make up its loss."""

    def take_apart(self) -> bool:
        """Let the loss be called on the user's own batches again; False if it is already."""
        return False

    @abstractmethod
    def on(self, times: Tensor) -> Self:
        """The same on a sample of the rows: each as often as `times` [n] says."""

    @abstractmethod
    def on_batches(self, chosen: Tensor) -> Self:
        """On some of the batches, [b] bool."""

    # ---- of many mixtures at once ----------------------------------------------------------------

    adds_up = False  # whether losses of rows are sums over blocks of [O], in closed form

    @property
    def block(self) -> int:
        """Neighbouring numbers that mean nothing without each other."""
        return self.numbers

    @property
    def is_by_row(self) -> bool:
        """Whether every number of the outputs belongs to a row."""
        return True

    @abstractmethod
    def factors(self, shares: Tensor, by_row: bool) -> Tensor:
        """shares [p, units] of rows (or batches) in p means → what `gradients` takes."""

    @abstractmethod
    def gradients(self, mixed: Tensor, columns: slice, factors: Tensor) -> Tensor:
        """Of p losses, each with factors of its own, in p mixtures of some columns of [O], [p, c].

        The columns are whole blocks.
        """

    def row_losses(self, mixed: Tensor, columns: slice) -> Tensor:
        """What these columns of p mixtures, [p, c], add to the loss of each row, [p, n]."""
        raise NotImplementedError

    # ---- labels --------------------------------------------------------------------------------

    def labels(self, outputs: Sequence[Tensor], seed: int = 0) -> Labels:
        """Do any of these outputs [O] fit their own rows better than rows that were mixed up?

        Labels that were shuffled, or belong to other data, can still be fitted: by being less sure
        of everything. A choice by them is worth nothing.
        """
        moved, best, lowest = False, outputs[0], inf
        for own in self._objective.events.over("checking labels", outputs, len(outputs)):
            loss = self.loss(own)
            if loss < lowest:
                best, lowest = own, loss
            others = self._mixed_up_losses(own, torch.Generator().manual_seed(seed))
            # mixing rows of one class, or a batch of one row, changes nothing
            others = others[(others - loss).abs() > 1e-9 * abs(loss)]
            if 0 < len(others) < ENOUGH_MIXINGS:
                return "matter"
            moved = moved or len(others) > 0
            if len(others) and loss < float(others.min()):
                return "matter"
        if not moved:
            return self._unmoved(outputs[0])
        return "noise" if self._knows_less_than_nothing(best) else "weak"

    def _knows_less_than_nothing(self, outputs: Tensor) -> bool:
        """Do outputs [O] fit surely worse than if all rows had their mean?

        Of honest labels that hardly depend on the row, they do not; of others' labels they do.
        """
        mean = self._mean_over_rows(outputs)
        own, blank = self.unit_losses(outputs), None if mean is None else self.unit_losses(mean)
        if own is None or blank is None:
            return True  # cannot be told; mixed-up rows have fitted as well
        behind = Grouping.make(self.counts, True, self.groups).means(own - blank)
        return not float(behind.mean()) <= SURE * float(behind.std()) / len(behind) ** 0.5

    @abstractmethod
    def _mean_over_rows(self, outputs: Tensor) -> Tensor | None:
        """outputs [O] with those of each row replaced by the mean of all; None: there is none."""

    @abstractmethod
    def _mixed_up_losses(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Of outputs [O] whose rows were mixed up MIXINGS times."""

    @abstractmethod
    def _unmoved(self, outputs: Tensor) -> Labels:
        """What it means that no mixing changes the loss of outputs [O]."""
