"""Compare averages by the losses of the same units: standard errors, folds, the expected loss."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from sewa_cli.objective.intervals import FEWEST_UNITS, difference
from sewa_cli.report.findings import Expected
from sewa_cli.solvers.outputs.predictions import ROUNDING
from sewa_cli.text import finite

SAME = 1e-6  # of the loss: a difference by rounding


def assign_folds(units: int, folds: int, seed: int) -> Tensor:
    """Return the fold of each unit, drawn at random, [units]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(units, generator=generator) % folds


def means(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each row of losses [J, units], [J]; Inf for NaN."""
    return (losses @ weights / weights.sum()).nan_to_num(nan=inf)


def paired(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far each mean of losses [J, units] is behind the best, and its standard error."""
    share = weights / weights.sum()
    differences = losses - losses[int(means(losses, weights).argmin())]
    behind = differences @ share
    variance = ((differences - behind[:, None]) ** 2) @ share
    return behind, (variance / max(len(share) - 1, 1)).sqrt()


def compare(losses: Tensor, weights: Tensor) -> list[dict[str, float | None]]:
    """Return each mean of losses [J, units], how far it is behind and the error, for a report."""
    found = torch.stack([means(losses, weights), *paired(losses, weights)], 1).tolist()
    return [dict(zip(("loss", "behind", "error"), map(finite, row), strict=True)) for row in found]


def behind_in_errors(losses: Tensor, weights: Tensor) -> Tensor:
    """Return z ≥ 0 [J]: how far each mean is behind the best, in standard errors."""
    behind, error = paired(losses, weights)
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


def expect(nested: Tensor, baseline: Tensor, weights: Tensor, seed: int) -> Expected:
    """Say what to expect of new examples.

    nested    losses of each unit [units] by a choice that has not seen it
    baseline  those of the baseline that is best on the other folds
    """
    loss = float(means(nested[None], weights)[0])
    spread = float(means((nested - loss)[None] ** 2, weights)[0])
    error = (spread / (len(weights) - 1)) ** 0.5 if len(weights) >= FEWEST_UNITS else None
    by, interval = difference(baseline, nested, weights, seed)
    if abs(by) <= SAME * abs(loss):  # the same average, but for rounding
        by, interval = 0.0, None
    return Expected(loss=loss, error=error, by=by, interval=interval)
