"""E-values: how much noisy scores say that one average is better than another.

Differences d_j of two averages on the same parts come one by one, and whoever watches them may stop
at any moment. A t-test looked at again and again finds a winner in noise sooner or later; an
e-process does not. Under the null hypothesis, that the two are exchangeable on every part (so that
d_j is as likely as −d_j), for any λ and any s_j that depends on |d_1|, …, |d_j| alone,

    E_n = ∏_j exp(λ d_j / s_j) / cosh(λ d_j / s_j)

is a martingale that begins with 1 (de la Peña 1999): given |d_j|, each factor is 1 in the mean.
So is its mean over several λ, and P(E_n ≥ 1/α for any n) ≤ α (Ville), whatever the distribution
of the scores: no normality, no variance, no smallest number of parts. s_j is the root mean square
so far, which makes E independent of the metric's unit.
"""

from __future__ import annotations

from math import exp, log

import torch
from torch import Tensor

from sewa_cli.objective.intervals import student_t

SURE = 100.0  # E from which we speak of a winner: at most one in a hundred is none
ONE_SIDED = 2.326  # the normal's 99 %
LARGEST = 700.0  # log E; a float holds no more
FURTHEST = 1e308  # two finite scores may be further apart than a number can be
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # λ: large for clear differences, small for many parts


def evidence(differences: Tensor) -> float:
    """Return the e-value of differences [n], in the order in which they came, being above 0."""
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

    Its 95 % interval leaves out 0 in four of five cases with so many: n = (1.96 + 0.84)² (σ/d̄)².
    """
    if len(differences) < 2:
        return None
    mean, deviation = float(differences.mean()), float(differences.std())
    if mean == 0 or deviation == 0:
        return None
    return max(1, round((2.8 * deviation / mean) ** 2))
