"""What to expect on new rows, of losses that nested folds have given."""

from __future__ import annotations

from torch import Tensor

from sewa_cli.objective.intervals import FEWEST, difference
from sewa_cli.report.select import Expected

SAME = 1e-6  # of the loss: a difference by rounding


def expect(nested: Tensor, simple: Tensor | None, weights: Tensor, seed: int) -> Expected:
    """Of losses [units]; `simple`: the best simple average's by other folds, None: not known."""
    loss = float(nested @ weights / weights.sum())
    spread = ((nested - loss) ** 2) @ weights / weights.sum()
    error = float((spread / (len(weights) - 1)).sqrt()) if len(weights) >= FEWEST else None
    if simple is None:
        return Expected(loss=loss, error=error, by=None, interval=None)
    by, interval = difference(simple, nested, weights, seed)
    if abs(by) <= SAME * abs(loss):  # the same average, but for rounding
        by, interval = 0.0, None
    return Expected(loss=loss, error=error, by=by, interval=interval)
