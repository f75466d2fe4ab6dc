"""K checkpoints with equal coefficients, chosen by predicted losses; K too, if it is to be found.

For `K: auto` masks of every size are learned without each of five folds of the examples and judged
on the fold, next to the baselines. The one with the lowest loss is learned anew on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.methods import Run, parse_one
from sewa_cli.methods.family import Name, grid
from sewa_cli.report.select import BudgetOption
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED, Choice, Problem, mask, register
from sewa_cli.solvers.outputs.folds import assign_folds, best_on_other_folds, expect, means, paired
from sewa_cli.solvers.outputs.masks import improve, relax
from sewa_cli.solvers.outputs.predictions import mean
from sewa_cli.solvers.outputs.survey import Predicting, Survey
from sewa_cli.text import finite, with_K

EVALUATIONS = 50  # of the gradient, for each K
POOR = 0.01  # of the loss: a smaller error of the prediction is none


class Linear(Predicting):
    """Chooses K among predicted outputs: two reads of the checkpoints, forward passes only."""

    section = "linear"

    def choose(self, problem: Problem, K: int) -> Choice:
        """Choose K of the checkpoints, or as many as cross-validation finds best."""
        seen = self.survey(problem, K)
        return self._find_k(seen) if K == AUTO else self._choose(seen, K)

    def choose_by(self, seen: Survey, K: int) -> Choice:
        """Choose by predictions alone."""
        s, chosen = best_mask(seen, K)
        return Choice.of(chosen, seen.predictions.k, probabilities=s.tolist())

    def _choose(self, seen: Survey, K: int) -> Choice:
        problem, predictions = seen.problem, seen.predictions
        s, chosen = best_mask(seen, K)
        found = Choice.of(chosen, predictions.k, probabilities=s.tolist())
        with problem.events.stage("checking the result"):
            flat = problem.trajectory.mix_few(found.coefficients)
            loss = float(means(seen.true_losses(flat[None]), predictions.weights)[0])
        losses, error = seen.means(), predictions.loss(mean(chosen, predictions.k)) - loss
        gained = losses["uniform", None] - loss
        if not problem.one_of_many and abs(error) > max(abs(gained), POOR * abs(loss)):
            problem.events.warn(
                f"the predicted loss of the choice is off by {error:.3g}, more than the "
                f"{gained:.3g} it gained over the mean of all: predictions are poor on this run; "
                "--solver gumbel may do better"
            )
        return replace(
            found,
            simple=losses,
            examples=problem.objective.selection,
            holds=predictions.size.bytes,
            details={
                "cache": asdict(predictions.size),
                "surrogate_error": error,
                "loss": loss,
            },
        )

    def _find_k(self, seen: Survey) -> Choice:
        """Choose among masks of every size and the baselines by cross-validation."""
        problem, predictions, folds = seen.problem, seen.predictions, self.settings.folds
        weights, k = predictions.weights, predictions.k
        if len(weights) < folds:
            raise TaskError(f"K: auto needs {folds} {seen.unit} or more, found {len(weights)}")
        fold, sizes = assign_folds(len(weights), folds, problem.seed), grid(k)
        learned = self._validate(seen, fold, sizes)
        names: list[Name] = [*((LEARNED, K) for K in sizes), *seen.losses]
        losses = torch.cat([learned, seen.all_losses])
        chosen = int(means(losses, weights).argmin())
        name, K = names[chosen]
        found = Choice(_coefficients(name, K, k), with_K(name, K))
        nested, error = best_on_other_folds(losses, weights, fold), 0.0
        if name == LEARNED:
            assert K is not None
            found = self._choose(seen, K)
            error = found.details["surrogate_error"]
        simple = best_on_other_folds(seen.all_losses, weights, fold)
        behind, off = paired(losses, weights)
        values = zip(names, means(losses, weights), behind, off, strict=True)
        return replace(
            found,
            simple=seen.means(),
            examples=problem.objective.selection,
            expected=expect(nested - error, simple, weights, problem.seed),
            budget=[
                BudgetOption(
                    name=name,
                    K=K,
                    loss=finite(float(loss)),
                    behind=finite(float(by)),
                    error=finite(float(error)),
                    chosen=i == chosen,
                )
                for i, ((name, K), loss, by, error) in enumerate(values)
            ],
            holds=predictions.size.bytes,
            details=found.details or {"cache": asdict(predictions.size)},
        )

    def _validate(self, seen: Survey, fold: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return losses [sizes, units] of masks that were learned without the unit's fold."""
        predictions, folds = seen.predictions, range(self.settings.folds)
        gradient = predictions.gradient_on(torch.stack([fold != f for f in folds]))
        found = torch.zeros(len(sizes), len(fold), dtype=torch.float64)
        s = torch.full((len(folds), predictions.k), 1 / predictions.k, dtype=torch.float64)
        for position, K in seen.problem.events.over("folds", list(enumerate(sizes)), len(sizes)):
            s = relax(gradient, K, s * (K / s.sum(1, keepdim=True)), EVALUATIONS)
            masks = [mean(mask.largest(one, K), predictions.k) for one in s]
            found[position] = predictions.losses(torch.stack(masks)).gather(0, fold[None])[0]
        return found


def best_mask(seen: Survey, K: int) -> tuple[Tensor, list[int]]:
    """Return s [k] and the K checkpoints whose average has the lowest predicted loss."""
    predictions = seen.predictions
    k = predictions.k
    everything = torch.ones(1, len(predictions.weights), dtype=torch.bool)
    start = torch.full((1, k), K / k, dtype=torch.float64)
    [s] = relax(predictions.gradient_on(everything), K, start, EVALUATIONS)
    starts = [mask.largest(s, K)]
    for name in ("lawa", "latest"):
        starts.append([i for i, c in enumerate(_coefficients(name, K, k)) if c != 0])
    losses = predictions.means(torch.stack([mean(one, k) for one in starts]))
    return s, improve(predictions, starts[int(losses.argmin())])


def _coefficients(name: str, K: int | None, k: int) -> list[float]:
    if name == LEARNED:
        return [0.0] * k
    return parse_one(name)(Run(k), K)[0]


register("linear", Linear)
