"""The default: coefficients for all checkpoints, between moving averages and what the data favour.

1  The outputs of any average are predicted around the best moving average (`outputs.survey`).
2  The prior π is the mean of the moving averages, with weights exp(−z²): z is how many standard
   errors a loss is behind the best one. A run that still moves gets a short average, one that
   has settled a long one; where the examples cannot tell, some of each.
3  A path leads from π to what the data favour: coefficients that minimise L(c) + λ·KL(c ‖ π),
   for six λ, the smaller the more examples there are (`outputs.path`).
4  Prior and path are made anew without each of five folds of the examples, and judged on the
   fold. The answer is the mean of the path, with weights exp(−2z).
5  The folds also give the expected loss on new data: each example is scored by coefficients
   that were learned, and a path that was weighed, without it.
6  The true loss of the answer decides between it and π, and the best moving average is used if
   it is significantly better than both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sewa_cli.report.select import Blend, Pulled, Share
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED, Choice, Problem, register
from sewa_cli.solvers.outputs.folds import (
    assign_folds,
    behind_in_errors,
    best_on_other_folds,
    expect,
    means,
    paired,
)
from sewa_cli.solvers.outputs.path import path
from sewa_cli.solvers.outputs.predictions import Predictions
from sewa_cli.solvers.outputs.survey import Predicting, Survey
from sewa_cli.text import finite, with_K

STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3)  # n·λ: the more examples, the weaker
NEGLIGIBLE = 0.002  # of all weight: the smallest coefficients, not worth a checkpoint each
SURE = 2.0  # standard errors by which a moving average is better than what was learned
FEWEST = 10  # units: fewer cannot be cross-validated
Progress = Callable[[int, int], None]


class Aggregate(Predicting):
    """The default: coefficients for all checkpoints, between moving averages and the data's."""

    section = "aggregate"
    takes_k = False

    def choose(self, problem: Problem, K: int) -> Choice:
        """Choose coefficients for all that help; K is auto."""
        if K != AUTO:
            raise ValueError(f"K must be auto, found {K}")
        seen = self.survey(problem)
        return _best_moving_average(seen) or self._learn(seen)

    def choose_by(self, seen: Survey, K: int) -> Choice:  # noqa: ARG002
        """Choose by predictions alone."""
        simple = _best_moving_average(seen)
        return simple or Choice(self._estimate(seen).coefficients.tolist())

    def _estimate(self, seen: Survey) -> Estimate:
        moving = torch.stack([seen.averages[name] for name in seen.moving])
        losses = torch.stack([seen.losses[name] for name in seen.moving])
        events = seen.problem.events
        return estimate(
            seen.predictions,
            moving,
            losses,
            assign_folds(losses.shape[1], self.settings.folds, seen.problem.seed),
            lambda done, of: events.progress("learning", done, of),
        )

    def _learn(self, seen: Survey) -> Choice:
        problem, predictions = seen.problem, seen.predictions
        found, losses = self._estimate(seen), seen.means()
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
        return Choice(
            c.tolist(),
            name,
            simple=losses,
            examples=problem.objective.selection,
            expected=expect(
                expected,
                best_on_other_folds(seen.all_losses, predictions.weights, found.fold),
                predictions.weights,
                problem.seed,
            ),
            blend=_blend(seen, found, c),
            holds=predictions.size.bytes,
            details={
                "cache": asdict(predictions.size),
                "surrogate_error": error,
                "units": len(predictions.weights),
                "by_row": seen.splits,
            },
        )


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
    progress: Progress = lambda _done, _of: None,
) -> Estimate:
    """Weigh moving averages [R, k] with losses [R, units], learn, and cross-validate all of it.

    The path is solved side by side on all units and without each fold; `fold` [units].
    """
    weights, folds = predictions.weights, range(int(fold.max()) + 1)
    members = torch.stack([torch.ones_like(fold, dtype=torch.bool), *(fold != f for f in folds)])
    shares = torch.stack([prior_shares(losses[:, some], weights[some]) for some in members])
    priors = shares @ moving
    before = predictions.losses(priors)
    scale = [
        means(own[None, some], weights[some]) for own, some in zip(before, members, strict=True)
    ]
    pulled = path(
        predictions.gradient_on(members),
        priors,
        torch.cat(scale),
        strengths_for(len(fold)),
        progress,
    )
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
    losses, units = seen.means(), len(seen.predictions.weights)
    if units >= FEWEST:
        return None
    best = min(seen.moving, key=losses.__getitem__)
    seen.problem.events.warn(
        f"cross-validation takes {FEWEST} {seen.unit} of selection data, found {units}; "
        f"`{with_K(*best)}` is used, and nothing is learned"
    )
    return Choice(
        seen.averages[best].tolist(),
        with_K(*best),
        simple=losses,
        examples=seen.problem.objective.selection,
        details={"units": units, "by_row": seen.splits},
    )


def _blend(seen: Survey, found: Estimate, c: Tensor) -> Blend:
    weights, losses = seen.predictions.weights, found.validated
    behind, error = paired(losses, weights)
    strengths = (None, *strengths_for(len(weights)))
    columns = zip(strengths, means(losses, weights), behind, error, found.path, strict=True)
    return Blend(
        prior=[
            Share(name=name, K=K, share=share)
            for (name, K), share in zip(seen.moving, found.shares.tolist(), strict=True)
        ],
        path=[
            Pulled(
                strength=strength,
                loss=finite(float(loss)),
                behind=finite(float(by)),
                error=finite(float(off)),
                share=float(share),
            )
            for strength, loss, by, off, share in columns
        ],
        weights=found.prior.tolist(),
        effective=float(1 / (c @ c)),
        learned=float((c - found.prior).abs().sum() / 2),
    )


register("aggregate", Aggregate)
