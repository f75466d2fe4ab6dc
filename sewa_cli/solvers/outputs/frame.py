"""The outputs that are kept of the examples: one vector [O] in pieces, and the loss of each piece.

A part is what the loss is known of: an example, or a batch where the loss does not split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece(ABC):
    """Neighbouring parts of the examples, and the columns of [O] with their outputs."""

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
class Frame(ABC):
    """The examples in pieces, made at a base; `identity` names them for the memo."""

    pieces: Sequence[Piece]
    identity: str

    @property
    def numbers(self) -> int:
        """Return O."""
        return int(self.pieces[-1].columns.stop)

    @abstractmethod
    def run(self) -> Tensor:
        """Return the outputs [O] of the weights in the model."""
