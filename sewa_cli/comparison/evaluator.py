"""The run as methods see it, and the evaluator of what they propose.

No average is evaluated twice, whoever asks for it; every row is charged in full for what it asked,
so that its cost is what the method would have cost alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from sewa_cli import solvers
from sewa_cli.dtypes import Array
from sewa_cli.errors import ConfigError
from sewa_cli.extensions import make_solver
from sewa_cli.methods import Coefficients, checked
from sewa_cli.methods import Run as Proposing
from sewa_cli.objective.memo import Tensors
from sewa_cli.objective.units import UnitLosses
from sewa_cli.placing import PlacedRun
from sewa_cli.report.kinds import RowContest, RowCost
from sewa_cli.report.shared import Measured
from sewa_cli.rng import seeded
from sewa_cli.scores import AverageScores, Key, Scored, same
from sewa_cli.scoring.heldout import means_of_others
from sewa_cli.scoring.metric import Metric, open_metric
from sewa_cli.settings import AUTO
from sewa_cli.solvers import PREDICTING, Problem, Solver
from sewa_cli.solvers.contest import Outcome
from sewa_cli.solvers.outputs.survey import Predicting, Survey

T = TypeVar("T")
NOTHING = RowCost(forward_passes=0, backward_passes=0, bytes_read=0, seconds=0.0)


class ChargedScores(AverageScores):
    """Scores that charge each row what it asked for, in full, whoever asked for it before.

    evaluations  of parts, which only whoever asks for them counts
    """

    def __init__(self, run: PlacedRun) -> None:
        super().__init__(run.session, run.trajectory, run.memory_left)
        self._cost: dict[Key, RowCost] = {}
        self._charged: set[Key] = set()
        self._row = NOTHING
        self.evaluations = 0

    def once(self, kind: str, key: Sequence[object], work: Callable[[], T]) -> T:
        full = (kind, *key)
        if full not in self._cost:
            before = self._meter()
            super().once(kind, key, work)
            self._cost[full] = _sum(self._meter(), before, sign=-1)
        if full not in self._charged:
            self._charged.add(full)
            self._row = _sum(self._row, self._cost[full])
        return super().once(kind, key, work)

    def charge(self, work: Callable[[], T]) -> T:
        """Do work that is another one each time."""
        before = self._meter()
        value = work()
        self._row = _sum(self._row, _sum(self._meter(), before, sign=-1))
        return value

    def next_row(self) -> RowCost:
        """Return what the row that ends here has cost."""
        cost, self._row = self._row, NOTHING
        self._charged.clear()
        return cost

    def count(self, kind: str) -> int:
        return sum(key[0] == kind for key in self._cost)

    def _meter(self) -> RowCost:
        passes = self._session.objective.passes
        return RowCost(
            forward_passes=passes.forward,
            backward_passes=passes.backward,
            bytes_read=self._trajectory.bytes_moved,
            seconds=time.perf_counter(),
            evaluations=self.evaluations,
        )


def _sum(one: RowCost, two: RowCost, sign: int = 1) -> RowCost:
    other = two.model_dump()
    return RowCost(**{name: value + sign * other[name] for name, value in one.model_dump().items()})


def open_evaluator(run: PlacedRun, learner: Solver) -> Evaluator:
    """Open what methods may ask for; refuse now what could not be judged in the end."""
    scores = ChargedScores(run)
    run = replace(run, scores=scores)
    config, problem = run.session.config, run.problem(one_of_many=True)
    if not config.compare.fast:
        return Evaluator(run, scores, learner, problem, None, _open_metric(run))
    if config.solver not in (None, *solvers.BUILTIN):
        run.session.events.warn("--fast: `sewa` chooses by predicted outputs, not by --solver")
    learner = make_solver(config, PREDICTING)
    assert isinstance(learner, Predicting)
    with seeded(config.seed):
        scores.once("prepare", [], partial(learner.prepare, problem))
        survey = learner.survey(problem)
    scores.next_row()  # it is charged to the methods that search
    scores = scores.on(run.session.on(survey.problem.objective.selection))
    run = replace(run, session=scores._session, scores=scores)
    return Evaluator(run, scores, learner, problem, survey, None)


def _open_metric(run: PlacedRun) -> Metric | None:
    if run.session.config.objective.metric is None:
        return None
    metric = open_metric(run)
    if metric.heldout_parts is None:
        metric.close()
        raise ConfigError(
            f"--metric {metric.criterion.name}: compare needs held-out parts: define "
            "heldout_parts(**args), or list four parts or more to choose by"
        )
    return metric


class Evaluator:
    """Answers what methods ask of a run, and evaluates what they propose.

    learner  the solver of the methods that learn
    survey   predicts the losses and gradients that methods see; None: they are measured
    """

    def __init__(
        self,
        run: PlacedRun,
        scores: ChargedScores,
        learner: Solver,
        problem: Problem,
        survey: Survey | None,
        metric: Metric | None,
    ) -> None:
        self.run, self.metric, self.survey = run, metric, survey
        self.seed = run.session.config.seed
        self.scores = scores
        self.contested: RowContest | None = None  # of the row under way
        self._learner, self._problem = learner, problem
        self._batches = run.session.objective.batches()

    def proposing(self) -> Proposing:
        by_loss: dict[str, Any] = {}
        if self.run.session.task.has_loss:
            by_loss = {"loss": self.predicted_loss if self.survey else self.selection_loss}
            by_loss |= {"gradient": self.gradient, "learn": self.learn}
        return self.run.for_methods(contest=self.contest, **by_loss)

    def close(self) -> None:
        """Let go of what was prepared, and end the metric's workers."""
        self._problem.kept.clear()
        if self.metric is not None:
            self.metric.close()

    def begin_row(self) -> None:
        """Every method sees the selection batches from the start, whoever came before it."""
        self._batches = self.run.session.objective.batches()
        self.contested = None

    def learn(self, K: int) -> Coefficients:
        self._prepare()

        def work() -> Coefficients:
            with seeded(self.seed):
                solver = self._learner
                if K == AUTO:  # whichever solver makes masks, this one makes weights
                    solver = make_solver(self.run.session.config, solvers.WEIGHING)
                if self.survey is not None:
                    assert isinstance(solver, Predicting)
                    return solver.choose_by(self.survey, K).coefficients
                return solver.choose(self._problem, K).coefficients

        return self.scores.once("learn", [K], work)

    def contest(self, name: str, K: int) -> Coefficients:
        """Return what a solver by the metric chooses, within the budget."""
        metric = self.metric
        if metric is None:
            raise ConfigError(f"methods: {name} chooses by a metric; name one: --metric NAME")

        def work() -> tuple[Coefficients, RowContest | None]:
            with seeded(self.seed):
                solver = make_solver(self.run.session.config, name)
                choice = solver.choose(metric.problem(), K)
            board, outcome = metric.board, choice.find(Outcome)
            self.scores.evaluations += board.spent
            if outcome is None:
                return choice.coefficients, None
            found = RowContest(confirmed=outcome.confirmed, interrupted=board.interrupted)
            return choice.coefficients, found

        coefficients, self.contested = self.scores.once(f"contest {name}", [K], work)
        return coefficients

    def _prepare(self) -> None:
        self.scores.once("prepare", [], lambda: self._learner.prepare(self._problem))

    def predicted_loss(self, coefficients: Sequence[float]) -> float:
        assert self.survey is not None
        self._prepare()
        predictions = self.survey.predictions
        c = checked(coefficients, self.run.trajectory.k, "run.loss")
        mixed = torch.tensor(c, dtype=torch.float64)
        return self.scores.once("predict", same(c), lambda: predictions.loss(mixed))

    def gradient(self, coefficients: Sequence[float]) -> tuple[float, list[float]]:
        """Return both on the next selection batch; predicted ones are on all examples."""
        trajectory, seen = self.run.trajectory, self.survey
        if seen is not None:
            self._prepare()
        c = torch.tensor(list(coefficients), dtype=torch.float64)

        def work() -> tuple[float, list[float]]:
            if seen is not None:
                loss, gradient = seen.predictions.loss_and_gradient(c)
                return loss, gradient.tolist()
            batch = next(self._batches)

            def run() -> Tensors:
                flat = trajectory.mix(c[None])[0]
                loss, gradient = self.run.session.objective.gradient(flat, [batch])
                return {"loss": loss, "gradient": trajectory.pull_back(gradient[None])[0]}

            key = ("gradient", trajectory.kind, c, batch)
            draw = hash(tuple(c.tolist())) % 2**63  # the same whatever was asked before
            found = self.run.session.objective.recall(key, run, draw)
            return float(found["loss"]), found["gradient"].tolist()

        return self.scores.charge(work)

    def selection_loss(self, coefficients: Sequence[float]) -> float:
        """Return the loss of the average as it is mixed, BatchNorm statistics averaged along."""
        c = checked(coefficients, self.run.trajectory.k, "run.loss")
        return self.scores.selection(c)[0]

    def evaluate(self, coefficients: Sequence[float]) -> Scored:
        """Measure all that the task has; by a metric, held-out parts and nothing else."""
        if (metric := self.metric) is None:
            return self.scores.evaluate(coefficients)
        return self.scores.once(
            "evaluate", same(coefficients), lambda: self._evaluate_parts(metric, coefficients)
        )

    def _evaluate_parts(self, metric: Metric, coefficients: Sequence[float]) -> Scored:
        """Held-out scores by part, NaN where one has failed: `compare_drafts` makes up for that."""
        before = metric.heldout_evaluations
        with seeded(self.seed):
            found = metric.score_heldout(tuple(coefficients))
        assert found is not None  # `_open_metric` asks for held-out parts
        self.scores.evaluations += metric.heldout_evaluations - before
        units = UnitLosses(metric.pick(found), metric.weights["heldout"], None)
        scores = Measured(selection_loss=None, metrics=means_of_others(metric, found))
        return Scored(scores, 0, units)

    def statistics(self, coefficients: Sequence[float]) -> Mapping[str, Array]:
        """Return the BatchNorm statistics that the average was evaluated with."""
        if self.metric is None:
            return self.evaluate(coefficients).statistics
        return self.scores.load_as_file(coefficients)
