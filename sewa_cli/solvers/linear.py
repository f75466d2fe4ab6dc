"""K checkpoints with equal coefficients, chosen by predicted losses; K too, if it is to be found.

    min over s of  L(Σ (s_i / K) y_i),   0 ≤ s ≤ 1,  Σ s = K

is convex wherever the user's loss is convex in the outputs y_i. It is solved by spectral projected
gradient (Birgin, Martínez and Raydan 2000), rounded to its K largest, and improved by swaps.

For `K: auto` (--sparse) masks of sizes 1, 2, 5, 10 … are learned without each of five folds of the
units and judged on the fold. They compete with the baselines, by the true losses of these. The
lowest mean over all examples decides. A mask is then learned anew on all examples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.methods import Run, parse_one
from sewa_cli.methods.fixed import Name, grid
from sewa_cli.report.findings import Budget, BudgetOption, Mask
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED, Choice, Problem, mask, register
from sewa_cli.solvers.outputs.predictions import Gradient, Predictions, mean
from sewa_cli.solvers.outputs.survey import Predicting, Survey
from sewa_cli.stats import assign_folds, best_on_other_folds, compare_means, means
from sewa_cli.text import with_K

EVALUATIONS = 50  # of the gradient, for each K
POOR = 0.01  # of the loss: a smaller error of the prediction is none
TOLERANCE = 1e-6  # of the loss; an improvement by less is none
STILL = 1e-12  # squared length of a step that leads nowhere
SWAPS = 50  # tried before the search ends


class Linear(Predicting):
    """K checkpoints by predicted outputs; forward passes only."""

    section = "linear"

    def choose(self, problem: Problem, K: int) -> Choice:
        seen = self.survey(problem, K)
        return self._find_k(seen) if K == AUTO else self._choose(seen, K)[0]

    def choose_by(self, seen: Survey, K: int) -> Choice:
        """Round the relaxed mask, or take `lawa` or `latest` if these are better; then swap."""
        predictions, k = seen.predictions, seen.predictions.k
        everything = torch.ones(1, len(predictions.weights), dtype=torch.bool)
        start = torch.full((1, k), K / k, dtype=torch.float64)
        [s] = relax(predictions.gradient_on(everything), K, start, EVALUATIONS)
        simple = torch.tensor(
            [parse_one(name)(Run(k), K)[0] for name in ("lawa", "latest")], dtype=torch.float64
        )
        starts = torch.cat([mean(mask.largest(s, K), k)[None], simple])
        best = starts[int(predictions.means(starts).argmin())]
        chosen = improve(predictions, best.nonzero()[:, 0].tolist())
        return Choice.of(chosen, k, Mask(probabilities=s.tolist()))

    def _choose(self, seen: Survey, K: int) -> tuple[Choice, float]:
        """Choose K and run the result; return the error of its predicted loss, too."""
        problem, predictions = seen.problem, seen.predictions
        found = self.choose_by(seen, K)
        with problem.events.stage("checking the result"):
            flat = problem.trajectory.mix_few(found.coefficients)
            loss = float(means(seen.true_losses(flat[None]), predictions.weights)[0])
        error = predictions.loss(mean(found.selected, predictions.k)) - loss
        gained = seen.means["uniform", None] - loss
        if not problem.one_of_many and abs(error) > max(abs(gained), POOR * abs(loss)):
            problem.events.warn(
                f"the predicted loss of the choice is off by {error:.3g}, more than the "
                f"{gained:.3g} it gained over the mean of all: predictions are poor on this run; "
                "--solver gumbel may do better"
            )
        return seen.describe(found, surrogate_error=error, loss=loss), error

    def _find_k(self, seen: Survey) -> Choice:
        """Choose among masks of the sizes in `grid` and the baselines by cross-validation."""
        predictions, folds, seed = seen.predictions, self.settings.folds, seen.problem.seed
        weights, k = predictions.weights, predictions.k
        if len(weights) < folds:
            raise TaskError(f"K: auto needs {folds} {seen.unit} or more, found {len(weights)}")
        fold, sizes = assign_folds(len(weights), folds, seed), grid(k)
        losses = torch.cat([self._validate(seen, fold, sizes), seen.all_losses])
        names: list[Name] = [*((LEARNED, K) for K in sizes), *seen.losses]
        chosen = int(means(losses, weights).argmin())
        name, size = names[chosen]
        nested = best_on_other_folds(losses, weights, fold)
        if name == LEARNED:
            found, error = self._choose(seen, sizes[chosen])
            nested -= error
        else:
            found = seen.describe(Choice(seen.averages[name, size].tolist(), with_K(name, size)))
        simple = best_on_other_folds(seen.all_losses, weights, fold)
        options = [
            BudgetOption(name=name, K=K, chosen=i == chosen, **values)
            for i, ((name, K), values) in enumerate(
                zip(names, compare_means(losses, weights), strict=True)
            )
        ]
        return found.having(seen.expect(nested, simple), Budget(options=options))

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


def relax(gradient: Gradient, K: int, starts: Tensor, evaluations: int) -> Tensor:
    """Solve p problems from s [p, k], by gradients alone; return s [p, k].

    The curvature of a step is what the one before has shown. It is taken if (g⁺ − g)·(s⁺ − s) ≤
    curvature·|s⁺ − s|², so that a convex loss falls; else the next one is shorter. A problem whose
    gradient is not finite stays where it is.
    """

    def slope_at(s: Tensor) -> Tensor:
        found = gradient(s / K) / K
        return torch.where(torch.isfinite(found).all(1, keepdim=True), found, 0.0)

    def project(v: Tensor) -> Tensor:
        return torch.stack([mask.project_to_sum(one, K) for one in v])

    s = project(starts)
    g = slope_at(s)
    steepest = (g - g.mean(1, keepdim=True)).abs().amax(1)
    curvature = torch.where(steepest > 0, 2 * steepest, 1.0)  # no element moves by more than a half
    for _ in range(evaluations):
        new = project(s - g / curvature[:, None])
        moved, slope = new - s, slope_at(new)
        bend, length = ((slope - g) * moved).sum(1), (moved * moved).sum(1)
        if float(length.max()) < STILL:
            break
        seen = bend / length.clamp_min(1e-300)
        taken = seen <= curvature
        s = torch.where(taken[:, None], new, s)
        g = torch.where(taken[:, None], slope, g)
        # a direction with little curvature must not be left in one step
        curvature = torch.where(taken, torch.maximum(seen, curvature / 10), 1.5 * seen)
    return s


def improve(predictions: Predictions, chosen: Sequence[int]) -> list[int]:
    """Swap one checkpoint for another as long as that lowers the predicted loss.

    The swaps that the gradient promises most of are tried first.
    """
    k, now = predictions.k, sorted(chosen)
    for _ in range(2 * len(now)):
        loss, gradient = predictions.loss_and_gradient(mean(now, k))
        outside = [i for i in range(k) if i not in set(now)]
        promised = gradient[outside][:, None] - gradient[now][None, :]  # [k − K, K]
        order = promised.reshape(-1).argsort()[:SWAPS].tolist()
        tried = [
            sorted({*now, outside[place // len(now)]} - {now[place % len(now)]}) for place in order
        ]
        losses = [predictions.loss(mean(one, k)) for one in tried]
        if not min(losses) < loss - TOLERANCE * abs(loss):
            break
        now = tried[losses.index(min(losses))]
    return now


register("linear", Linear)
