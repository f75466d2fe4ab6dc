"""The default: coefficients for all checkpoints, between moving averages and what the data favour.

1  The outputs of any average are predicted around the best moving average (`outputs.survey`).
2  The prior π is the mean of the moving averages, with weights exp(−z²): z is how many standard
   errors a loss is behind the best one. A run that still moves gets a short average, a
   settled run a long one; where the examples cannot tell, some of each.
3  A path leads from π to what the data favour: coefficients that minimise L(c) + λ·KL(c ‖ π),
   for six λ, the smaller the more examples there are (`path`).
4  Prior and path are made anew without each of five folds of the examples, and judged on the
   fold. The answer is the mean of the path, with weights exp(−2z).
5  The folds also give the expected loss on new data: each example is scored by coefficients
   that were learned, and a path that was weighed, without it.
6  The true loss of the answer decides between it and π, and the best moving average is used if
   it is significantly better than both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sewa_cli.report.findings import Blend, Pulled, Share
from sewa_cli.solvers import LEARNED, Choice, Problem, register
from sewa_cli.solvers.outputs.predictions import Gradient, Predictions
from sewa_cli.solvers.outputs.survey import Predicting, Survey
from sewa_cli.stats import (
    ROUNDING,
    assign_folds,
    behind_in_errors,
    best_on_other_folds,
    compare_means,
    means,
)
from sewa_cli.text import with_K

STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3)  # n·λ: the more examples, the weaker
NEGLIGIBLE = 0.002  # of all weight: the smallest coefficients, not worth a checkpoint each
SURE = 2.0  # standard errors by which a moving average is better than what was learned
FEWEST = 10  # units: fewer cannot be cross-validated
EVALUATIONS = 8  # of the gradient, for each λ; with 300 the loss is lower by less than 10⁻⁴
FLOOR = 0.03  # of the prior is spread evenly: a coefficient of zero could never grow


class Aggregate(Predicting):
    """The default: coefficients between moving averages and the data."""

    section = "aggregate"
    takes_k = False

    def choose(self, problem: Problem, K: int) -> Choice:
        seen = self.survey(problem, K)
        return _best_moving_average(seen) or self._learn(seen)

    def choose_by(self, seen: Survey, K: int) -> Choice:  # noqa: ARG002
        simple = _best_moving_average(seen)
        return simple or Choice(self._estimate(seen).coefficients.tolist())

    def _estimate(self, seen: Survey) -> Estimate:
        moving = torch.stack([seen.averages[name] for name in seen.moving])
        losses = torch.stack([seen.losses[name] for name in seen.moving])
        fold = assign_folds(losses.shape[1], self.settings.folds, seen.problem.seed)
        learning = partial(seen.problem.events.progress, "learning")
        return estimate(seen.predictions, moving, losses, fold, learning)

    def _learn(self, seen: Survey) -> Choice:
        problem, predictions = seen.problem, seen.predictions
        found, losses = self._estimate(seen), seen.means
        answer, prior = found.coefficients, found.prior
        with problem.events.stage("checking the result"):
            flats = problem.trajectory.mix(torch.stack([answer, prior]))
            true = seen.true_losses(flats)
        del flats
        best = min(seen.moving, key=losses.__getitem__)
        loss, prior_loss = means(true, predictions.weights).tolist()
        error = predictions.loss(answer) - loss
        c, name, own, expected = answer, LEARNED, true[0], found.nested - error
        if not loss <= prior_loss:
            c, own, expected = prior, true[1], found.validated[0]
        if behind_in_errors(torch.stack([own, seen.losses[best]]), predictions.weights)[0] > SURE:
            c, name, expected = seen.averages[best], with_K(*best), seen.losses[best]
        if c is not answer:
            problem.events.warn(
                f"the learned average has a selection loss of {loss:.5g}, no better than the "
                "moving averages that it was learned from, which are used"
            )
        baseline = best_on_other_folds(seen.all_losses, predictions.weights, found.fold)
        expects = seen.expect(expected, baseline)
        choice = Choice(c.tolist(), name).having(expects, _blend(seen, found, c))
        units = len(found.fold)
        return seen.describe(choice, surrogate_error=error, units=units, by_row=seen.splits)


@dataclass(frozen=True)
class Estimate:
    """The coefficients and what the folds say of them; losses are predicted."""

    coefficients: Tensor  # [k]
    prior: Tensor  # [k]
    shares: Tensor  # [R], of the moving averages in the prior
    path: Tensor  # [λ + 1], the weights along the path; the prior itself is first
    validated: Tensor  # [λ + 1, units], cross-validated losses
    nested: Tensor  # [units], losses of the whole procedure on units that it has not seen
    fold: Tensor  # [units]


def estimate(
    predictions: Predictions,
    moving: Tensor,
    losses: Tensor,
    fold: Tensor,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Estimate:
    """Weigh moving averages [R, k] with losses [R, units], learn, and cross-validate all of it.

    The path is solved side by side on all units and without each fold; `fold` [units].
    """
    weights, folds = predictions.weights, range(int(fold.max()) + 1)
    members = torch.stack([torch.ones_like(fold, dtype=torch.bool), *(fold != f for f in folds)])
    shares = torch.stack([prior_shares(losses[:, some], weights[some]) for some in members])
    priors = shares @ moving
    own = zip(predictions.losses(priors), members, strict=True)
    scale = torch.cat([means(losses[None, some], weights[some]) for losses, some in own])
    gradient = predictions.gradient_on(members)
    pulled = path(gradient, priors, scale, strengths_for(len(fold)), progress)
    solutions = torch.cat([priors[None], pulled])  # [λ + 1, 1 + folds, k]
    validated = torch.zeros(len(solutions), len(fold), dtype=torch.float64)
    for f in folds:
        validated[:, fold == f] = predictions.losses(solutions[:, 1 + f])[:, fold == f]
    along = path_shares(validated, weights)
    unseen = []
    for f in folds:  # the path is weighed by the other folds
        rest = fold != f
        unseen.append(path_shares(validated[:, rest], weights[rest]) @ solutions[:, 1 + f])
    nested = predictions.losses(torch.stack(unseen)).gather(0, fold[None])[0]
    c = drop_negligible(along @ solutions[:, 0])
    return Estimate(c, priors[0], shares[0], along, validated, nested, fold)


def strengths_for(units: int) -> list[float]:
    """Return λ along the path: the more units, the further they can lead from the prior."""
    return [strength / units for strength in STRENGTHS]


def prior_shares(losses: Tensor, weights: Tensor) -> Tensor:
    """Weigh moving averages with losses [R, units] by exp(−z²), [R]."""
    shares = torch.exp(-(behind_in_errors(losses, weights) ** 2))
    return shares / shares.sum()


def path_shares(losses: Tensor, weights: Tensor) -> Tensor:
    """Weigh strengths with cross-validated losses [λ + 1, units] by exp(−2z), [λ + 1]."""
    shares = torch.exp(-2 * behind_in_errors(losses, weights))
    return shares / shares.sum()


def drop_negligible(c: Tensor) -> Tensor:
    """Set the smallest coefficients [k], which make up next to nothing, to zero."""
    ordered, order = c.sort()
    kept = c.clone()
    kept[order[ordered.cumsum(0) <= NEGLIGIBLE]] = 0.0
    return kept / kept.sum()


def _best_moving_average(seen: Survey) -> Choice | None:
    """Choose the best moving average where examples are too few to learn, and warn of it."""
    losses, units = seen.means, len(seen.predictions.weights)
    if units >= FEWEST:
        return None
    best = min(seen.moving, key=losses.__getitem__)
    seen.problem.events.warn(
        f"cross-validation needs {FEWEST} {seen.unit} of selection data, found {units}; "
        f"`{with_K(*best)}` is used, and nothing is learned"
    )
    found = Choice(seen.averages[best].tolist(), with_K(*best))
    return seen.describe(found, units=units, by_row=seen.splits)


def _blend(seen: Survey, found: Estimate, c: Tensor) -> Blend:
    weights = seen.predictions.weights
    strengths = (None, *strengths_for(len(weights)))
    options = zip(
        strengths, found.path.tolist(), compare_means(found.validated, weights), strict=True
    )
    return Blend(
        prior=[
            Share(name=name, K=K, share=share)
            for (name, K), share in zip(seen.moving, found.shares.tolist(), strict=True)
        ],
        path=[Pulled(strength=s, share=share, **values) for s, share, values in options],
        weights=found.prior.tolist(),
        effective=float(1 / (c @ c)),
        learned=float((c - found.prior).abs().sum() / 2),
    )


def path(
    gradient: Gradient,
    priors: Tensor,
    scale: Tensor,
    strengths: Sequence[float],
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Tensor:
    """Solve p problems with priors π [p, k] and losses L₀ [p] for falling λ; [λ, p, k] float64.

    min over c ≥ 0, Σ c = 1 of L(c) + λ·L₀·KL(c ‖ π), each begun at the solution before. Mirror
    descent has a closed form in log c: (log c/η + λL₀·log π − g) / (1/η + λL₀) − const. A step is
    taken if (g⁺ − g)·(c⁺ − c) ≤ KL(c⁺ ‖ c)/η, so that a convex loss falls; else η is lowered.
    """
    log_prior = ((1 - FLOOR) * priors + FLOOR / priors.shape[1]).log()
    x, c = log_prior.clone(), log_prior.exp()  # log c, and c
    g = gradient(c)
    # the first step moves no coefficient by more than a factor of e
    eta = 1 / (g - (c * g).sum(1, keepdim=True)).abs().amax(1).clamp_min(1e-300)
    found: list[Tensor] = []
    for strength in strengths:
        pull = (strength * scale.abs())[:, None]
        good = eta
        for evaluation in range(1, EVALUATIONS + 1):
            rate = 1 / eta[:, None]
            y = (rate * x + pull * log_prior - g) / (rate + pull)
            y = y - torch.logsumexp(y, 1, keepdim=True)
            moved, slope = y.exp(), gradient(y.exp())
            bend = ((slope - g) * (moved - c)).sum(1)
            taken = bend <= (moved * (y - x)).sum(1) / eta + ROUNDING * scale.abs()
            here = taken[:, None]
            x, c = torch.where(here, y, x), torch.where(here, moved, c)
            g = torch.where(here, slope, g)
            good = torch.where(taken, eta, good)
            eta = torch.where(taken, 1.6 * eta, eta / 3)
            progress(len(found) * EVALUATIONS + evaluation, len(strengths) * EVALUATIONS)
        eta = good  # at rest every step fails by rounding: that says nothing of the next λ
        found.append(c)
    return torch.stack(found)


register("aggregate", Aggregate)
