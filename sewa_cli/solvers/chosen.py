"""What a solver has decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from sewa_cli.methods import Coefficients
from sewa_cli.solvers import Solution
from sewa_cli.solvers.crossvalidate import Budget
from sewa_cli.solvers.linear import Labels, Surrogate
from sewa_cli.solvers.stability import Stability


@dataclass(frozen=True)
class Round:
    """One linearisation: where, its true loss there, and the choice: predicted, and true."""

    base: str
    base_loss: float
    predicted: float
    loss: float


@dataclass(frozen=True)
class Cache:
    """The outputs that the linear solver worked on, for each checkpoint."""

    numbers: int
    dtype: str
    bytes: int
    rows: int
    of_rows: int  # selection rows; more than `rows` if not all would fit


@dataclass
class Chosen:
    """The weights of the average, and what is known about them."""

    coefficients: Coefficients
    name: str  # `learned`, or the simple average that cross-validation prefers
    K: int
    solution: Solution | None = None
    rounds: list[Round] = field(default_factory=list)
    cache: Cache | None = None
    surrogate_error: float | None = None
    swaps_tried: int = 0
    loss: float | None = None  # the true selection loss, on the rows that the cache has
    labels: Labels | None = None
    budget: Budget | None = None
    stability: Stability | None = None

    @property
    def selected(self) -> list[int]:
        return [i for i, c in enumerate(self.coefficients) if c != 0]


def cache_of(here: Surrogate) -> Cache:
    found = here.size
    return Cache(
        numbers=found.numbers,
        dtype=found.dtype,
        bytes=found.bytes,
        rows=found.rows,
        of_rows=found.of_rows,
    )
