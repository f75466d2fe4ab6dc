"""Shares, path and nested cross-validation, all in output space: no checkpoint is read here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, permutations
from math import inf

import torch
from torch import Tensor

from sewa_cli.report.select import Blend
from sewa_cli.solvers import Problem
from sewa_cli.solvers.linear.pull import path
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.solvers.linear.units import Units

# Measured on tuning seeds 0 to 2 (docs/default.md): flatter shares of the rungs give away what the
# rows know, and so do flatter ones of the path; the minimum of the path trusts few rows too much.
PRIOR_SHARPNESS = 1.0  # a rung's share: exp(−s·z²)
PATH_SHARPNESS = 4.0  # a pull's share: exp(−s·z)
AHEAD = 2.0  # standard errors by which a part of the run must lead to count
FAR_AHEAD = 4.0  # by few rows
CRUMBS = 0.002  # of all weight, in the smallest: left out, as they are not worth a checkpoint each
ROUNDING = 1e-7  # of the loss: what float32 outputs do not tell apart


@dataclass(frozen=True)
class Estimate:
    """The weights and what the folds say of them; losses are predicted, but for simple averages."""

    coefficients: Tensor  # [k]
    prior: Tensor  # [k], where the path began
    answers: Tensor  # of all, without each fold, without each two in order: to go on from
    path: Tensor  # [λ + 1], the shares along the path; the prior itself is first
    behind: Tensor  # [λ + 1], cross-validated loss behind the best one's
    error: Tensor  # [λ + 1], standard error of that
    validated: Tensor  # [λ + 1], cross-validated loss
    before: Tensor  # [units], cross-validated losses of the prior
    nested: Tensor  # [units], losses of the whole procedure on units that it has not seen
    simple: Tensor  # [units], of the simple average that is best on the other folds


@dataclass(frozen=True)
class Prior:
    """What π is a mean of: rungs [R, k] with their losses [R, units].

    `parts`: which of them are means of a part of the run, [R]. They count only where the best is
    ahead of every other rung for sure: a run that has jumped from one basin to another. `sharpest`:
    π is the best rung alone, as where there is a hill between them.
    """

    rungs: Tensor
    losses: Tensor
    parts: Tensor
    sharpest: bool = False

    def shares(self, weights: Tensor, of: Tensor | slice = slice(None)) -> Tensor:
        """By some of the units, [R]; `weights` [units]."""
        losses, weights = self.losses[:, of], weights[of]
        z = torch.full((len(losses),), inf, dtype=torch.float64)
        moving = losses[~self.parts]
        z[~self.parts] = behind_in_errors(moving, weights)
        if bool(self.parts.any()):
            whole = behind_in_errors(losses, weights)
            best = torch.cat([moving, losses[whole.argmin()][None]])
            if float(behind_in_errors(best, weights)[:-1].min()) > AHEAD:
                z = whole
        shares = torch.exp(-PRIOR_SHARPNESS * z**2)
        if self.sharpest:
            shares = (torch.arange(len(z)) == int(z.argmin())).double()
        return shares / shares.sum()


def estimate(
    surrogate: Surrogate,
    units: Units,
    prior: Prior,
    simple_losses: Tensor,
    folds: int,
    problem: Problem,
    priors: Tensor | None = None,
) -> Estimate:
    """simple_losses [F, units] of the whole family; `priors`: answers to go on from.

    The path is solved side by side on all units, without each fold, and without each two.
    """
    count, weights = len(units), units.weights
    few = are_few(units)
    generator = torch.Generator().manual_seed(problem.seed)
    fold = torch.randperm(count, generator=generator) % folds  # of each unit
    # the answers to go on from differ by which of the two is the outer fold
    pairs = combinations if priors is None else permutations
    left_out = [(), *combinations(range(folds), 1), *pairs(range(folds), 2)]
    place = {some[::-1]: p for p, some in enumerate(left_out)}
    place |= {some: p for p, some in enumerate(left_out)}
    members = torch.ones(len(left_out), count, dtype=torch.bool)
    for p, some in enumerate(left_out):
        for f in some:
            members[p] &= fold != f
    if priors is None:
        priors = torch.stack([prior.shares(weights, member) @ prior.rungs for member in members])
    before = units.losses_of(surrogate, priors)
    pulled = path(
        units.gradient_on(surrogate, members, problem.room - surrogate.size.bytes),
        priors,
        torch.stack([units.mean_on(*pair) for pair in zip(before, members, strict=True)]),
        progress=lambda done, of: problem.events.progress("learning", done, of),
    )
    solutions = torch.cat([priors[None], pulled])  # [λ + 1, p, k]
    told = problem.events.over("validating", range(len(left_out)), len(left_out))
    losses = [units.losses_of(surrogate, solutions[:, p]) for p in told]
    validated = torch.zeros(len(solutions), count, dtype=torch.float64)
    nested, simple = torch.zeros(2, count, dtype=torch.float64)
    answers = {}
    for f in range(folds):
        here, rest = fold == f, fold != f
        validated[:, here] = losses[place[f,]][:, here]
        inner = torch.zeros_like(validated)
        others = [g for g in range(folds) if g != f]
        for g in others:
            inner[:, fold == g] = losses[place[f, g]][:, fold == g]
        shares = path_shares(inner[:, rest], weights[rest], few)
        for some in ((f,), *((f, g) for g in others)):  # nothing of the fold is in any of them
            answers[some] = shares @ solutions[:, place[some]]
        nested[here] = units.losses_of(surrogate, answers[f,][None])[0, here]
        means = torch.nan_to_num(simple_losses[:, rest] @ weights[rest], nan=inf)
        simple[here] = simple_losses[int(means.argmin()), here]
    shares = path_shares(validated, weights, few)
    answers[()] = shares @ solutions[:, 0]
    behind, error = paired(validated, weights)
    following = [(), *combinations(range(folds), 1), *permutations(range(folds), 2)]
    return Estimate(
        coefficients=without_crumbs(answers[()]),
        prior=priors[0],
        answers=torch.stack([answers[some] for some in following]),
        path=shares,
        behind=behind,
        error=error,
        validated=validated @ weights / weights.sum(),
        before=validated[0],
        nested=nested,
        simple=simple,
    )


def paired(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """losses [J, n], weights [n] → how far each mean is behind the best, and that one's error."""
    share = weights / weights.sum()
    means = torch.nan_to_num(losses @ share, nan=inf)
    differences = losses - losses[int(means.argmin())]
    behind = differences @ share
    variance = ((differences - behind[:, None]) ** 2) @ share
    return behind, (variance / max(len(share) - 1, 1)).sqrt()


def behind_in_errors(losses: Tensor, weights: Tensor) -> Tensor:
    """z [J] ≥ 0: how far each mean is behind the best, in standard errors of the difference."""
    behind, error = paired(losses, weights)
    least = ROUNDING * float((losses.abs() @ weights / weights.sum()).nan_to_num(inf).min())
    z = behind / error.clamp_min(least + 1e-300)
    return torch.where(torch.isfinite(z), z.clamp_min(0.0), inf)


def are_few(units: Units) -> bool:
    """Whether what they teach on top of π is mostly luck."""
    return units.independent < Blend.FEW


def path_shares(losses: Tensor, weights: Tensor, few: bool = False) -> Tensor:
    """Of pulls with cross-validated losses [λ + 1, n], [λ + 1]; by few rows the prior has all."""
    if few:
        return torch.eye(len(losses), dtype=torch.float64)[0]
    shares = torch.exp(-PATH_SHARPNESS * behind_in_errors(losses, weights))
    return shares / shares.sum()


def without_crumbs(c: Tensor) -> Tensor:
    """Weights [k] whose smallest, which make up next to nothing, are zero."""
    ordered, order = c.sort()
    kept = c.clone()
    kept[order[ordered.cumsum(0) <= CRUMBS]] = 0.0
    return kept / kept.sum()
