"""All statistics: standard errors, folds, intervals by resampling, and e-values.

Losses come as a matrix [R, n]: R averages on the same n units, so that differences
are paired. The best of many is lucky by selection alone; the intervals of differences therefore
hold for all pairs of rows at once, by the bootstrapped maximum of the studentised differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, log, nan

import torch
from torch import Tensor

from sewa_cli.direction import Goal, Sums
from sewa_cli.report.shared import Interval
from sewa_cli.text import finite

LEVEL = 0.95
FEWEST_UNITS = 20  # with fewer units than this, resampling them says too little
HIGHEST = torch.finfo(torch.float64).max
ROUNDING = 1e-7  # of the loss: what float32 outputs do not tell apart


def unit_scores(
    found: Sequence[float | Sums], corpus: Callable[[Sums], float] | None = None
) -> Tensor:
    """Return a score [n] for each unit, whose mean is the score of all; NaN: it has failed."""
    if corpus is None or all(isinstance(one, float) for one in found):
        return torch.tensor(found, dtype=torch.float64)
    return _jackknifed(tuple(found), corpus)


@lru_cache(maxsize=256)  # the same averages are compared again and again
def _jackknifed(found: Sequence[float | Sums], corpus: Callable[[Sums], float]) -> Tensor:
    """Return n − 1 times the change of the score of all without each unit, around that score.

    The spread of these is that of the score (the jackknife), and their mean is the score.
    """
    known = [place for place, one in enumerate(found) if isinstance(one, tuple)]
    scores = torch.full((len(found),), nan, dtype=torch.float64)
    if not known:
        return scores
    sums = torch.tensor([found[place] for place in known], dtype=torch.float64)
    whole = sums.sum(0)
    score = corpus(tuple(whole.tolist()))
    left = [corpus(tuple((whole - one).tolist())) for one in sums] if len(known) > 1 else [score]
    without = torch.tensor(left, dtype=torch.float64).nan_to_num(score, score, score)
    scores[known] = score + (len(known) - 1) * (without.mean() - without)
    return scores


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


# ---- standard errors and folds ------------------------------------------------------------------


def assign_folds(units: int, folds: int, seed: int) -> Tensor:
    """Return the fold of each unit, drawn at random, [units]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(units, generator=generator) % folds


def means(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each row of losses [J, units], [J]; Inf for NaN, HIGHEST for Inf."""
    return (losses @ weights / weights.sum()).nan_to_num(nan=inf)


def behind_best(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far each mean of losses [J, units] is behind the best, and its standard error."""
    share = weights / weights.sum()
    differences = losses - losses[int(means(losses, weights).argmin())]
    behind = differences @ share
    variance = ((differences - behind[:, None]) ** 2) @ share
    return behind, (variance / max(len(share) - 1, 1)).sqrt()


def compare_means(losses: Tensor, weights: Tensor) -> list[dict[str, float | None]]:
    """Return each mean of losses [J, units], how far it is behind and the error, for a report."""
    loss = means(losses, weights).masked_fill((losses >= HIGHEST).any(1), inf)
    found = torch.stack([loss, *behind_best(losses, weights)], 1).tolist()
    return [dict(zip(("loss", "behind", "error"), map(finite, row), strict=True)) for row in found]


def behind_in_errors(losses: Tensor, weights: Tensor) -> Tensor:
    """Return z ≥ 0 [J]: how far each mean is behind the best, in standard errors."""
    behind, error = behind_best(losses, weights)
    least = ROUNDING * float(means(losses.abs(), weights).min())
    z = behind / error.clamp_min(least + 1e-300)
    return torch.where(torch.isfinite(z), z.clamp_min(0.0), inf)


def best_on_other_folds(losses: Tensor, weights: Tensor, fold: Tensor) -> Tensor:
    """Return for each unit the loss [units] of what is best on the other folds.

    losses [J, units]; fold [units]
    """
    found = torch.zeros_like(weights)
    for f in range(int(fold.max()) + 1):
        rest = fold != f
        found[~rest] = losses[int(means(losses[:, rest], weights[rest]).argmin()), ~rest]
    return found


# ---- evidence ----------------------------------------------------------------------------------

SURE = 100.0  # E from which we speak of a winner: at most one in a hundred is none
ONE_SIDED = 2.326  # the normal's 99 %
LARGEST = 700.0  # log E; a float holds no more
FURTHEST = 1e308  # two finite scores may be further apart than a number can be
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # λ: large for clear differences, small for many parts


def evidence(differences: Tensor) -> float:
    """Return the e-value of differences [n], in the order in which they came, being above 0.

    Whoever watches them may stop at any moment. A t-test looked at again and again finds a winner
    in noise sooner or later; an e-process does not. Under the null hypothesis, that the two are
    exchangeable on every part (so that d_j is as likely as −d_j), for any λ and any s_j that
    depends on |d_1|, …, |d_j| alone,

        E_n = ∏_j exp(λ d_j / s_j) / cosh(λ d_j / s_j)

    is a martingale that begins with 1 (de la Peña 1999): given |d_j|, each factor is 1 in the mean.
    So is its mean over several λ, and P(E_n ≥ 1/α for any n) ≤ α (Ville), whatever the
    distribution of the scores. s_j is the root mean square so far, which makes E independent of the
    metric's unit.
    """
    d = differences.double().clamp(-FURTHEST, FURTHEST)
    if not (size := float(d.abs().max()) if len(d) else 0.0):
        return 1.0
    d = d / size  # no square of what is left is too large or too small
    squares = torch.cumsum(d * d, 0) / torch.arange(1, len(d) + 1, dtype=torch.float64)
    u = d / squares.sqrt().clamp_min(1e-300)
    rates = torch.tensor(RATES, dtype=torch.float64)[:, None]
    x = rates * u
    log_cosh = x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - log(2)
    logs = (x - log_cosh).sum(dim=1)
    return exp(min(float(torch.logsumexp(logs, 0)) - log(len(RATES)), LARGEST))


def is_shown(differences: Tensor) -> bool:
    """Return whether differences, looked at once and all together, show a mean above 0.

    The e-value alone does not: an average that wins often by little and loses rarely by much is
    not symmetric, though its mean is 0 or less, and ten wins in a row are 100. So the mean has to
    be above 0 by Student's t too, corrected for skew (Hall 1992), at the same level.
    """
    d = differences.double()
    if len(d) < 2 or evidence(d) < SURE:
        return False
    d = (d / d.abs().max()).clamp(-1, 1)
    n, mean, variance = len(d), float(d.mean()), float(d.var())
    if variance == 0:
        return mean > 0
    t, skew = mean / variance**0.5, float(((d - mean) ** 3).mean()) / variance**1.5
    corrected = t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / (6 * n)
    return bool(corrected * n**0.5 >= student_t(ONE_SIDED, n - 1))


def parts_needed(differences: Tensor) -> int | None:
    """Return how many parts in all would show a difference as large as this one.

    None: there is no difference, or no spread.

    Its 95 % interval leaves out 0 in four of five cases with n parts: n = (1.96 + 0.84)² (σ/d̄)².
    """
    if len(differences) < 2:
        return None
    mean, deviation = float(differences.mean()), float(differences.std())
    if mean == 0 or deviation == 0:
        return None
    return max(1, round((2.8 * deviation / mean) ** 2))
