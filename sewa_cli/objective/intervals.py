"""Is a difference real? Intervals by resampling units: examples, groups of them, or batches.

Losses come as a matrix [R, n]: R averages on the same n units, so that differences
are paired. The best of many is lucky by selection alone; the intervals of differences therefore
hold for all pairs of rows at once, by the bootstrapped maximum of the studentised differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sewa_cli.direction import Goal
from sewa_cli.objective.units import UnitLosses
from sewa_cli.report.shared import Interval

LEVEL = 0.95
Unit = Literal["rows", "groups", "batches"]
FEWEST_UNITS = 20  # with fewer units than this, resampling them says too little


@dataclass(frozen=True)
class Spread:
    """Per row: its mean, its own interval, its difference from the best and that one's interval."""

    means: list[float]
    intervals: list[tuple[float, float]]
    differences: list[float]
    difference_intervals: list[tuple[float, float]]
    best: int


def compare_rows(
    losses: Tensor, weights: Tensor, seed: int = 0, samples: int = 2000, goal: Goal = "min"
) -> Spread:
    """losses [R, n] and weights [n] (rows in each unit), float64. n must be FEWEST_UNITS or more.

    `goal`: max if the highest mean is the best, as of scores. Differences are how far behind it.

    Means are weighted: Σ w l / Σ w. In a resample every unit counts as often as it was drawn.
    """
    rows, n = losses.shape
    if n < FEWEST_UNITS:
        raise ValueError(f"{n} units are too few to resample; it takes {FEWEST_UNITS}")
    means = losses @ weights / weights.sum()
    best = int(means.argmin() if goal == "min" else means.argmax())
    resampled = _resample(losses, weights, seed, samples)  # [B, R]
    tail = (1 - LEVEL) / 2
    low, high = resampled.quantile(tail, dim=0), resampled.quantile(1 - tail, dim=0)

    # all pairs at once, one row against all others at a time to bound memory
    errors = resampled - means  # [B, R]
    largest = torch.zeros(samples, dtype=torch.float64)
    for i in range(rows):
        error = errors - errors[:, i : i + 1]  # of the difference to row i
        size = error.std(dim=0)
        real = size > 1e-12  # the same average twice has no error
        if real.any():
            largest = torch.maximum(largest, (error.abs() / size)[:, real].max(dim=1).values)
    # resamples of n examples vary too little, by √((n − 1)/n), and their size is itself uncertain:
    # without this, 18 % of comparisons of 15 equal rows on 20 examples find a difference
    critical = student_t(float(largest.quantile(LEVEL)), n - 1) * (n / (n - 1)) ** 0.5
    differences = means - means[best] if goal == "min" else means[best] - means
    half = critical * (errors - errors[:, best : best + 1]).std(dim=0)
    return Spread(
        means=means.tolist(),
        intervals=list(zip(low.tolist(), high.tolist(), strict=True)),
        differences=differences.tolist(),
        difference_intervals=list(
            zip((differences - half).tolist(), (differences + half).tolist(), strict=True)
        ),
        best=best,
    )


def difference(
    one: Tensor, two: Tensor, weights: Tensor, seed: int = 0
) -> tuple[float, Interval | None]:
    """The mean of one − two, losses [n] of the same units; its interval, where they are enough."""
    by = float((one - two) @ weights / weights.sum())
    if len(weights) < FEWEST_UNITS:
        return by, None
    spread = compare_rows(torch.stack([one, two]), weights, seed)
    low, high = spread.difference_intervals[1 - spread.best]  # of the worse minus the better
    return by, Interval(low=low, high=high) if spread.best else Interval(low=-high, high=-low)


def paired(found: Sequence[UnitLosses]) -> tuple[Tensor, Tensor, Unit]:
    """Losses [R, n] of the same units, and their weights [n]; of batches where any has no rows."""
    by_row = [one.rows for one in found if one.rows is not None]
    splits = len(by_row) == len(found)
    units = found[0].grouping(splits)
    losses = torch.stack(by_row if splits else [one.batches for one in found])
    unit: Unit = "rows" if found[0].group_count is None else "groups"
    return units.means(losses), units.weights, unit if splits else "batches"


def student_t(z: float, degrees: int) -> float:
    """Return the quantile of Student's t for one of the normal (Abramowitz and Stegun 26.7.5)."""
    v = degrees
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)


def _resample(losses: Tensor, weights: Tensor, seed: int, samples: int) -> Tensor:
    """Weighted means of resampled units, [B, R]; in blocks, as [B, n] may be large."""
    n = losses.shape[1]
    generator = torch.Generator().manual_seed(seed)
    means = []
    block = max(1, min(samples, 5_000_000 // n))
    for start in range(0, samples, block):
        size = min(block, samples - start)
        drawn = torch.randint(n, (size, n), generator=generator)
        counts = torch.zeros(size, n, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        counts *= weights
        means.append(counts @ losses.T / counts.sum(dim=1, keepdim=True))
    return torch.cat(means)
