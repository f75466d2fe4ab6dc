"""The linear solver itself: linearise, choose, linearise at what was chosen, choose again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.errors import ConfigError
from sewa_cli.methods import Coefficients, mean_of
from sewa_cli.report.select import BudgetOption, ResampledGain, StabilityReport
from sewa_cli.settings import AUTO, Count, CountOrNone, Positive, Whole
from sewa_cli.solvers import LEARNED, Choice, Cost, Problem, Sizes, Solver, register
from sewa_cli.solvers.crossvalidate import Budget, Name, choose_budget, grid
from sewa_cli.solvers.linear import relax
from sewa_cli.solvers.linear.build import build, least, usual
from sewa_cli.solvers.linear.relax import Solution
from sewa_cli.solvers.linear.surrogate import Labels, Surrogate
from sewa_cli.solvers.linear.survey import (
    QUARTERS,
    Survey,
    predicted_loss,
    simple_average,
    simple_averages,
)
from sewa_cli.solvers.stability import QUICK, Stability, most_frequent, resample
from sewa_cli.text import finite
from sewa_cli.trajectory.dense import ROWS
from sewa_cli.trajectory.streamed import Streamed

NOISE = (
    "the loss on the selection data cannot be told from that with their rows mixed up, so the "
    "labels say nothing about these checkpoints"
)
UNSEEN = (
    "loss() gives the same whatever rows the batch has: if the model computes its own loss, return "
    "its outputs from predict() and compute the loss in loss(), or a prediction is worth little"
)
SMALL = 0.01  # of the loss: an error that nobody would act on
TYPICAL = 50  # iterations of projected gradient, of which each takes about two losses


class Linear(Solver):
    """Chooses among predicted outputs: a few reads of the checkpoints, forward passes only."""

    class Settings(Solver.Settings):
        h: Annotated[Positive, Field(le=1)] = Field(
            0.1, description="how far towards each checkpoint the model is evaluated"
        )
        rounds: Annotated[Whole, Field(ge=1, le=10)] = Field(
            2, description="1: linearised at the mean of all; 2: once more at the average found"
        )
        iterations: Count = Field(
            100, description="of projected gradient, at most; no checkpoint is read"
        )
        swaps: CountOrNone = Field(50, description="tried in output space before it is given up")
        exact_swaps: CountOrNone = Field(
            0, description="tried with true weights in the end; each reads two checkpoints"
        )
        bootstrap: CountOrNone = Field(
            20, description="resamples of the selection rows for stability; 0: none"
        )
        stable: bool = Field(False, description="choose what most resamples of the data choose")
        outputs: Count = Field(
            1_000_000, description="numbers kept for each checkpoint; more rows take long"
        )
        folds: Annotated[Whole, Field(ge=2)] = Field(
            5, description="of the selection rows, for K: auto"
        )

    needs = frozenset({"value", "outputs"})
    reading = "streamed"
    finds_k = True
    settings: Settings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._prepared: tuple[Problem, Survey, Surrogate] | None = None

    # ---- what every K shares -----------------------------------------------------------------

    def prepare(self, problem: Problem) -> None:
        if self._prepared is None or self._prepared[0] is not problem:
            survey = Survey(problem, self.settings.h, self.settings.outputs)
            self._prepared = (problem, survey, survey.first({}, 2)[0])

    def surveyed(self, problem: Problem) -> Surrogate:
        """The first cache, for whoever searches over it."""
        self.prepare(problem)
        assert self._prepared is not None
        return self._prepared[2]

    def choose_by(self, surrogate: Surrogate, K: int) -> Choice:
        """From the cache alone: nothing is read, nothing is judged by true weights."""
        found = relax.solve(surrogate, K, self.settings.iterations, self.settings.swaps)
        return Choice.of(found.selected, surrogate.k, probabilities=found.probabilities)

    def choose(self, problem: Problem, K: int) -> Choice:
        """K of the checkpoints, or as many as cross-validation finds best."""
        if problem.one_of_many:
            self.prepare(problem)
            assert self._prepared is not None
            _, survey, first = self._prepared
            return _Search(self.settings, problem, survey, first).find(K, None)
        survey = Survey(problem, self.settings.h, self.settings.outputs)
        trajectory = problem.trajectory
        if isinstance(trajectory, Streamed):  # not to be read again for the references
            trajectory.remember(mean_of(range(survey.k), survey.k), survey.scouted.uniform)
            trajectory.remember(mean_of([survey.k - 1], survey.k), survey.scouted.last)
        search = _Search(self.settings, problem, survey)
        if K == AUTO:
            return search.find_K()
        if survey.k <= K:
            raise ConfigError(
                f"K: {K} of {survey.k} checkpoints leaves nothing to choose; K must be at most "
                f"{survey.k - 1}"
            )
        wanted: dict[Name, Coefficients] = {}
        if isinstance(trajectory, Streamed):
            wanted = {("lawa", K): simple_average("lawa", K, survey.k)}
        search.cache, sums = survey.first(wanted, 2)
        if isinstance(trajectory, Streamed):
            for key, flat in sums.items():
                trajectory.remember(wanted[key], flat)
        return search.find(K, search.labels(search.cache))

    # ---- what it takes -----------------------------------------------------------------------

    def cost(self, sizes: Sizes) -> Cost:
        """Scouting, surveying, once more around what was found, and true weights in the end."""
        settings, k, B = self.settings, sizes.k, sizes.batches
        is_auto = sizes.K == AUTO
        K = grid(k)[-1] if is_auto else sizes.K
        quarters = len({i * QUARTERS // k for i in range(k)})
        forward = B * (1 + (quarters if quarters > 1 else 0))
        forward += settings.rounds * (2 + k) * B
        forward += B * (1 + settings.exact_swaps + settings.stable)
        forward += 2 * B * (1 + (settings.bootstrap > 0))
        reads = k + settings.rounds * k + (settings.rounds - 1) * K + K * (1 + settings.stable)
        reads += (K if settings.exact_swaps else 0) + 2 * settings.exact_swaps
        extra = 2
        if is_auto:
            forward += len(simple_averages(k)) * B
            extra += len(simple_averages(k))
            reads += K  # lawa, whose K was not known in time
        probe = _probe(sizes)
        numbers = probe.size.numbers * sizes.rows // probe.size.rows
        fits = least(k, numbers, extra) <= sizes.room and numbers <= settings.outputs
        if (
            not fits
        ):  # counted, and found too large: a pass more for each round, on the rows that fit
            forward += (settings.rounds + 4) * B
            reads += 2 * K
        return Cost(
            forward=forward,
            reads=reads,
            bytes=usual(k, min(numbers, settings.outputs), sizes.room, extra),
            seconds=self._seconds(probe, sizes),
            at_most=is_auto or settings.exact_swaps > 0 or not fits,
        )

    def _seconds(self, probe: Surrogate, sizes: Sizes) -> float:
        """From one loss in output space, and one mixture."""
        settings, k = self.settings, sizes.k
        even = torch.full((2,), 1 / 2, dtype=torch.float64)
        start = perf_counter()
        probe.loss_and_gradient(even)
        in_outputs = perf_counter() - start
        wide = torch.empty(min(k, ROWS), probe.size.numbers)
        start = perf_counter()
        wide.sum(0)
        mixing = (perf_counter() - start) * k / len(wide)
        evaluations = settings.rounds * 2 * TYPICAL + 4 * QUICK * settings.bootstrap
        if sizes.K == AUTO:
            evaluations += settings.folds * len(grid(k)) * 2 * TYPICAL
        return evaluations * sizes.batches * (in_outputs + 2 * mixing)


def _probe(sizes: Sizes) -> Surrogate:
    """A cache of one batch and two copies of the model's own weights, to be measured."""
    objective = replace(sizes.objective, selection=[next(sizes.objective.batches())])
    flat = objective.model.flat.clone()
    return build(objective, flat, 2, lambda: ((i, flat) for i in range(2)), 1.0, 2**40)


class _Search:
    """The choice among the outputs of one problem."""

    def __init__(
        self,
        settings: Linear.Settings,
        problem: Problem,
        survey: Survey,
        cache: Surrogate | None = None,
    ) -> None:
        self._settings = settings
        self._problem = problem
        self._survey = survey
        self.cache = cache  # around the scouted base
        self.k = survey.k

    def find(self, K: int, labels: Labels | None) -> Choice:
        """Round by round; what has the lowest true loss is kept."""
        settings, survey, alone = self._settings, self._survey, not self._problem.one_of_many
        here, self.cache = self.cache, None
        assert here is not None
        starts = [_members(name, K, self.k) for name in ("lawa", "latest")]
        found = self._solve(here, K, starts)
        base_loss, base = survey.scouted.loss, _name_of(survey.scouted.members, self.k)
        rounds: list[dict[str, object]] = []
        best: tuple[float, Solution] | None = None

        def finish_round(predicted: float, loss: float) -> None:
            about = {"base": base, "base_loss": base_loss, "predicted": predicted, "loss": loss}
            rounds.append(about)

        for _ in range(settings.rounds - 1):
            predicted = predicted_loss(here, found.selected)
            flat = survey.mix(mean_of(found.selected, self.k))
            del here  # one cache at a time, unless it is kept for others
            here = survey.around(flat)
            whole = here.size.rows == here.size.of_rows
            loss = here.loss(here.base) if whole else self._problem.objective.value(flat)
            finish_round(predicted, loss)
            if best is None or loss < best[0]:
                best = (loss, found)
            base, base_loss = "the average found", loss
            found = self._solve(here, K, [found.selected])
        loss = survey.loss_of_mean(found.selected)
        finish_round(predicted_loss(here, found.selected), loss)
        if best is not None and best[0] < loss:
            loss, found = best
        selected, loss, tried = self._swap_exactly(here, found.selected, loss)
        relaxed = torch.tensor(found.probabilities, dtype=torch.float64)
        stability = None
        if settings.bootstrap > 0 and alone:
            stability = self._resample(here, K, relaxed, survey.error(here, selected, loss))
        if settings.stable:
            if stability is None:
                raise ConfigError(
                    "--stable: the selection rows cannot be resampled: they are too few, the loss "
                    "does not split into rows, or linear.bootstrap is 0"
                )
            selected = most_frequent(stability, relaxed, K)
            loss = survey.loss_of_mean(selected)
        error = survey.error(here, selected, loss)
        if alone:
            self._warn_of_error(error, loss)
            self._warn_of_few(stability, K)
        return Choice.of(
            selected,
            self.k,
            probabilities=found.probabilities,
            history=found.history,
            frequencies=stability.frequencies if stability else None,
            labels=labels,
            stability=_reported(stability),
            holds=here.size.bytes,
            details={
                "rounds": rounds,
                "cache": asdict(here.size),
                "surrogate_error": error,
                "exact_swaps": tried,
                "loss": predicted_loss(here, selected) - error,
            },
        )

    def find_K(self) -> Choice:
        """Learned masks of every size beside the simple averages, cross-validated."""
        here, simple = self._with_simple_averages()
        budget = self._cross_validate(here, simple)
        if budget.labels != "matter":
            self._problem.events.warn(NOISE if budget.labels == "noise" else UNSEEN)
        option, size = budget.options[budget.chosen], here.size
        if option.name == LEARNED:
            assert option.K is not None
            self.cache = here
            del here, simple  # one cache at a time
            chosen = self.find(option.K, budget.labels)
            other = min((o for o in budget.options if o.name != LEARNED), key=lambda o: o.loss)
            if chosen.details["loss"] < other.loss:
                return chosen.but(budget=_options(budget))
            # what was predicted has not come true
            self._problem.events.warn(
                f"the learned average's true selection loss is {chosen.details['loss']:.5g}, no "
                f"better than the {other.name} average's {other.loss:.5g}, which is taken"
            )
            option = other
            budget = replace(budget, chosen=budget.options.index(other))
        if self._settings.stable:
            self._problem.events.warn(f"--stable: `{option.name}` is taken, which learns nothing")
        return Choice(
            simple_average(option.name, option.K, self.k),
            option.name,
            labels=budget.labels,
            budget=_options(budget),
            holds=size.bytes,
            details={"rounds": [], "cache": asdict(size)},
        )

    def labels(self, here: Surrogate) -> Labels:
        scouted = self._survey.scouted
        simple = [self._survey.outputs(here, flat) for flat in (scouted.uniform, scouted.last)]
        found = here.labels([here.base, *simple], self._problem.seed)
        if found != "matter":
            self._problem.events.warn(f"{NOISE}; choose by others" if found == "noise" else UNSEEN)
        return found

    def _with_simple_averages(self) -> tuple[Surrogate, dict[Name, Tensor]]:
        """The first cache, and outputs [O] of simple averages: true ones, where there is room."""
        wanted = simple_averages(self.k)
        vectors = len(wanted) * 4 * self._problem.trajectory.layout.size
        summed = wanted if vectors <= self._problem.room // 4 else {}
        here, sums = self._survey.first(summed, 2 + len(wanted))
        found = {
            key: self._survey.outputs(here, sums[key])
            if key in sums
            else here.mix(torch.tensor(coefficients, dtype=torch.float64))
            for key, coefficients in wanted.items()
        }
        found[("last", None)] = self._survey.outputs(here, self._survey.scouted.last)
        found[("uniform", None)] = self._survey.outputs(here, self._survey.scouted.uniform)
        return here, found

    def _solve(self, here: Surrogate, K: int, starts: Sequence[Sequence[int]]) -> Solution:
        total, events = self._settings.iterations, self._problem.events

        def tell(iteration: int, loss: float) -> None:
            events.progress("learning", iteration + 1, total, loss)

        return relax.solve(here, K, total, self._settings.swaps, starts, on_iteration=tell)

    def _swap_exactly(
        self, here: Surrogate, selected: list[int], loss: float
    ) -> tuple[list[int], float, int]:
        """Swaps that promise most by the surrogate, each judged with true weights."""
        tried, refused, tries = 0, set[tuple[int, ...]](), self._settings.exact_swaps
        if tries == 0:
            return selected, loss, 0
        flat = self._survey.mix(mean_of(selected, self.k)).clone()
        while tried < tries:
            promising = relax.swaps(here, selected, self._settings.swaps or tries)
            left = [swap for swap in promising if tuple(swap.chosen) not in refused]
            if not left:
                break
            swap = min(left, key=lambda swap: swap.loss)
            tried += 1
            change = [0.0] * self.k
            change[swap.gained], change[swap.lost] = 1 / len(selected), -1 / len(selected)
            moved = flat + self._survey.mix(change)
            after = self._problem.objective.value(moved)
            if after < loss:
                selected, loss, flat = swap.chosen, after, moved
            else:
                refused.add(tuple(swap.chosen))
        return selected, loss, tried

    def _cross_validate(self, here: Surrogate, simple: dict[Name, Tensor]) -> Budget:
        folds, events = self._settings.folds, self._problem.events
        weights = {key: 1 / sum(c * c for c in simple_average(*key, self.k)) for key in simple}
        return choose_budget(
            here,
            grid(self.k),
            simple,
            weights,
            folds=folds,
            iterations=self._settings.iterations,
            tries=self._settings.swaps,
            seed=self._problem.seed,
            on_fold=lambda fold: events.progress("folds", fold + 1, folds),
        )

    def _resample(self, here: Surrogate, K: int, relaxed: Tensor, error: float) -> Stability | None:
        total, events = self._settings.bootstrap, self._problem.events
        simple = {
            "last": self._survey.outputs(here, self._survey.scouted.last),
            "uniform": self._survey.outputs(here, self._survey.scouted.uniform),
        }
        return resample(
            here,
            K,
            total,
            relaxed,
            simple,
            -error,
            self._problem.seed,
            lambda number: events.progress("resampling", number + 1, total),
        )

    def _warn_of_error(self, error: float, loss: float) -> None:
        """A prediction that is off by more than what was gained has chosen by luck."""
        gained = self._survey.scouted.uniform_loss - loss
        if abs(error) > max(abs(gained), SMALL * abs(loss)):
            self._problem.events.warn(
                f"the predicted loss of the choice is off by {error:.3g}, more than the "
                f"{gained:.3g} it gained over the mean of all: predictions are poor on this run; "
                "--solver gumbel may do better"
            )

    def _warn_of_few(self, stability: Stability | None, K: int) -> None:
        if stability is None or not stability.too_few:
            return
        needed = stability.rows_needed
        advice = (
            f"about {needed} would do"
            if needed is not None and needed > stability.rows
            else "and more would hardly help; the mean of all is as good"
        )
        self._problem.events.warn(
            f"{stability.rows} selection rows are too few to choose {K} of {self.k} by: on rows it "
            f"has not seen, such a choice is no better than the mean of all; {advice}"
        )


def _members(name: str, K: int, k: int) -> list[int]:
    return [i for i, c in enumerate(simple_average(name, K, k)) if c != 0]


def _name_of(members: Sequence[int], k: int) -> str:
    if len(members) == k:
        return "the mean of all"
    return f"the mean of checkpoints {members[0]} to {members[-1]}"


def _options(budget: Budget) -> list[BudgetOption]:
    return [
        BudgetOption(
            name=option.name,
            K=option.K,
            loss=finite(option.loss),
            behind=finite(option.behind),
            error=finite(option.error),
            chosen=i == budget.chosen,
        )
        for i, option in enumerate(budget.options)
    ]


def _reported(found: Stability | None) -> StabilityReport | None:
    if found is None:
        return None
    return StabilityReport(
        resamples=found.resamples,
        gains={name: ResampledGain(**asdict(gain)) for name, gain in found.gains.items()},
        rows=found.rows,
        rows_needed=found.rows_needed,
    )


register("linear", Linear)
