"""Read the checkpoints twice: baselines with their losses, then predictions around the best.

first read    moving averages grow, from the newest checkpoint alone to the mean of all; each is
              run on the examples, and the best is the base
second read   the model is run near every checkpoint; the other baselines are summed up and run
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from sewa_cli.errors import CheckpointError, TaskError
from sewa_cli.methods import check_K
from sewa_cli.methods.fixed import Name, baselines, moving_averages
from sewa_cli.objective.units import Grouping, UnitLosses
from sewa_cli.report.findings import Expected
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Choice, Ground, Plan, Problem, Sizes, Solver, Stage
from sewa_cli.solvers.outputs.examples import PredictingSettings, settle
from sewa_cli.solvers.outputs.predictions import Predictions, predict
from sewa_cli.solvers.outputs.whole import WholeOutputs
from sewa_cli.stats import FEWEST_UNITS, HIGHEST, difference, means

ENDS: Sequence[Name] = (("last", None), ("uniform", None))
FEWEST_RUN = 3  # moving averages: the newest checkpoint, the mean of all, and one between
SAME = 1e-9  # of the loss: what the order of a sum may change
SAME_AVERAGE = 1e-6  # of the loss: a difference by rounding
SURE = 2.0  # standard errors by which outputs must fit their own examples better than others
EXCHANGED = (
    "the loss on the selection data is no better with the examples mixed up: their labels say "
    "little about these checkpoints, so check that they belong to the inputs"
)
UNSEEN = (
    "the loss stays the same if the examples are mixed up: if the model computes its own loss, "
    "return its outputs from predict() and compute the loss in loss(), or predictions mean little"
)


@dataclass(frozen=True)
class Survey:
    """Baselines and predictions, on the examples that take part.

    problem      the problem with these examples alone
    averages     baselines and their coefficients [k]
    losses       the loss of each unit [units] of every baseline
    moving       which of them are moving averages
    predictions  around the best of these
    splits       whether the loss splits into examples
    all_losses   the losses of all baselines, [F, units], and
    means        the mean of each
    """

    problem: Problem
    averages: Mapping[Name, Tensor]
    losses: Mapping[Name, Tensor]
    moving: Sequence[Name]
    predictions: Predictions
    splits: bool
    all_losses: Tensor
    means: dict[Name, float]

    def describe(self, choice: Choice, **found: Any) -> Choice:
        """Add what is the same for every choice from this survey."""
        ground = Ground(self.means, self.problem.objective.selection)
        return choice.having(ground, self.predictions.size.model_copy(update=found))

    def true_losses(self, flats: Tensor) -> Tensor:
        """Run weights [m, P] on the examples; return the loss of each unit, [m, units]."""
        objective = self.problem.objective
        grouping, splits = self.predictions.grouping, self.splits
        losses = [_by_unit(objective.learning_losses(flat), grouping, splits) for flat in flats]
        return torch.stack(losses)

    def expect(self, nested: Tensor, baseline: Tensor) -> Expected | None:
        """Say what to expect of new examples; None if that is no number.

        nested    losses of each unit [units] by a choice that has not seen it
        baseline  those of the baseline that is best on the other folds
        """
        if not float(nested.abs().max()) < HIGHEST:
            return None
        weights = self.predictions.weights
        loss = float(means(nested[None], weights)[0])
        spread = float(means((nested - loss)[None] ** 2, weights)[0])
        error = (spread / (len(weights) - 1)) ** 0.5 if len(weights) >= FEWEST_UNITS else None
        by, interval = difference(baseline, nested, weights, self.problem.seed)
        if abs(by) <= SAME_AVERAGE * abs(loss):
            by, interval = 0.0, None
        return Expected(loss=loss, error=error, by=by, interval=interval)

    @property
    def unit(self) -> str:
        """Name the units of the examples."""
        if not self.splits:
            return "batches (loss() does not split into examples; is it their mean?)"
        units = len(self.predictions.weights)
        return "examples" if units == self.predictions.size.rows else "groups"


class Predicting(Solver):
    """A solver that predicts the outputs of averages, around the best moving average."""

    section: ClassVar[str]  # of sewa.yaml, with its settings
    Settings = PredictingSettings
    settings: PredictingSettings
    needs = frozenset({"value", "outputs"})
    reading = "streamed"
    finds_k = True

    @abstractmethod
    def choose_by(self, seen: Survey, K: int) -> Choice:
        """Choose by predictions alone: nothing is read, no true loss is taken."""

    def prepare(self, problem: Problem) -> None:
        self.survey(problem)

    def survey(self, problem: Problem, K: int = AUTO) -> Survey:
        """Read the checkpoints twice; broken ones are left out.

        Where K is named, `latest` and `lawa` of K are among the baselines.
        """
        found = problem.kept.get("survey") or _survey(problem, self.settings, self.section, K)
        if problem.one_of_many:
            problem.kept["survey"] = found
        return found

    def plan(self, sizes: Sizes) -> Plan:
        """Declare the stages of a survey, and of learning and checking after it."""
        k, is_digest = sizes.k, self.settings.digests(sizes.classes)
        run = Baselines.fitting(k, sizes.K, sizes.vector, sizes.memory_left)
        kept, share = self.settings.fit(sizes, run.bytes)
        return Plan(
            [
                Stage("reading", 0 if is_digest else 1, reads=1),
                Stage("moving averages", len(run.moving)),
                Stage("outputs", k + 1, reads=1),
                Stage("baselines", len(run.others)),
                Stage("learning"),
                Stage("checking the result", 2, reads=1),
            ],
            run.bytes + kept,
            share,
        )


def _survey(problem: Problem, settings: PredictingSettings, section: str, K: int) -> Survey:
    trajectory = problem.trajectory
    run, flats = trajectory.settled(lambda: _read(problem, K))
    problem = replace(problem, memory_left=problem.memory_left - run.bytes)
    problem, examples = settle(problem, settings, section)
    objective, averages = problem.objective, run.averages
    shown = problem.events.over("moving averages", flats.items(), len(flats))
    found = {name: objective.learning_losses(flat) for name, flat in shown}
    splits = all(one.rows is not None or not one.is_finite for one in found.values())
    if not any(isfinite(one.mean) for one in found.values()):
        raise TaskError("loss() is NaN or Inf for every average; check it with `sewa validate`")
    grouping = next(iter(found.values())).grouping(splits)
    losses = {name: _by_unit(one, grouping, splits) for name, one in found.items()}

    of_moving = means(torch.stack(list(losses.values())), grouping.weights)
    base = list(found)[int(of_moving.argmin())]
    held = {name: flats[name] for name in (base, *ENDS)}
    del flats
    kept, at_base = examples.keep(problem, settings, held[base], splits)
    if isinstance(kept, WholeOutputs) and splits:
        _check_labels(problem, kept, at_base, grouping)
    sums = {name: torch.zeros_like(held[base]) for name in run.others}

    def add(i: int, row: Tensor) -> None:
        for name, total in sums.items():
            if (weight := float(averages[name][i])) != 0:
                total.add_(row, alpha=weight)

    at = held[base], averages[base], grouping, settings.h
    predictions = predict(problem, kept, at_base, *at, examples.of_rows, add)
    for name, flat in problem.events.over("baselines", sums.items(), len(sums)):
        losses[name] = _by_unit(objective.learning_losses(flat), grouping, splits)
    all_losses = torch.stack(list(losses.values()))
    total = all_losses @ grouping.weights / grouping.weights.sum()  # Inf stays Inf, for the report
    found_means = dict(zip(losses, total.tolist(), strict=True))
    best = min(losses, key=found_means.__getitem__)
    for name in (best, *ENDS):  # not to be read again for the report
        trajectory.remember(averages[name].tolist(), (sums | held)[name])
    found_by = averages, losses, run.moving, predictions, splits, all_losses, found_means
    return Survey(problem, *found_by)


def _by_unit(found: UnitLosses, grouping: Grouping, splits: bool) -> Tensor:
    """Return the loss of each unit; Inf where their mean is not finite."""
    if not found.is_finite:
        return torch.full_like(grouping.weights, torch.inf)
    if splits and found.rows is None:
        raise TaskError("loss() splits into examples for some averages only; return equal shapes")
    return grouping.means(found.rows if splits and found.rows is not None else found.batches)


def _read(problem: Problem, K: int) -> tuple[Baselines, dict[Name, Tensor]]:
    """Grow moving averages [P] row by row: m ← m + (c_i / (c_1 + … + c_i))·(w_i − m)."""
    trajectory = problem.trajectory
    if (k := trajectory.k) < 2:
        raise CheckpointError("only one checkpoint has finite weights; name several")
    if K != AUTO:
        check_K(K, k, k - 1)
    run = Baselines.fitting(k, K, 4 * trajectory.layout.size, problem.memory_left, problem.counts)
    flats: dict[Name, Tensor] = {}
    shares = {name: (c / c.cumsum(0)).nan_to_num(1.0) for name, c in run.averages.items()}
    for i, row in trajectory.rows():
        for name in run.moving:
            if i == 0:
                flats[name] = row.clone()
            else:
                flats[name].lerp_(row, float(shares[name][i]))
    return run, flats


def _check_labels(problem: Problem, kept: WholeOutputs, at: Tensor, grouping: Grouping) -> None:
    """Warn where outputs fit the labels of other examples as well as their own."""
    generator = torch.Generator().manual_seed(problem.seed)
    own, others = [], []
    for piece in kept.pieces:
        mixed = at[None, piece.columns]
        own.append(piece.losses(mixed)[0])
        others.append(piece.losses(piece.mixed_up(mixed, generator))[0])
    by = grouping.means(torch.cat(others) - torch.cat(own))
    if len(by) < 2 or all(piece.n == 1 for piece in kept.pieces):
        return
    if abs(float(by.mean())) <= SAME * abs(float(torch.cat(own).mean())):
        problem.events.warn(UNSEEN)
    elif float(by.mean()) <= SURE * float(by.std()) / len(by) ** 0.5:
        problem.events.warn(EXCHANGED)


@dataclass(frozen=True)
class Baselines:
    """The baselines that are run, as many as there is memory for.

    moving  grown while the checkpoints are read at first
    others  summed up while they are read again
    bytes   of their weights, held next to the predictions
    """

    averages: Mapping[Name, Tensor]
    moving: Sequence[Name]
    others: Sequence[Name]
    bytes: int

    @classmethod
    def fitting(
        cls, k: int, K: int, vector: int, memory_left: int, counts: Sequence[int] = ()
    ) -> Baselines:
        """Choose them for weights of `vector` bytes each."""
        most = memory_left // 4 // vector
        found = baselines(k, K, counts)
        every = {name: torch.tensor(c, dtype=torch.float64) for name, c in found.items()}
        moving = [name for name in moving_averages(k) if name in every]
        if len(moving) > (count := max(FEWEST_RUN, most)):
            moving = [moving[round(i * (len(moving) - 1) / (count - 1))] for i in range(count)]
        others = [name for name in every if name not in moving_averages(k)]
        others = others if len(others) <= most else []
        run = {name: every[name] for name in (*moving, *others)}
        return cls(run, moving, others, vector * max(len(moving), len(ENDS) + 1 + len(others)))
