"""The linear solver itself: linearise, choose, linearise at what was chosen, choose again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import ceil
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.errors import ConfigError
from sewa_cli.methods import mean_of
from sewa_cli.methods.family import Name, family, grid
from sewa_cli.report.select import BudgetOption, Expected
from sewa_cli.settings import AUTO, Count, CountOrNone, Whole
from sewa_cli.solvers import LEARNED, Choice, Plan, Problem, Sizes, Stage, Surveyor, register
from sewa_cli.solvers.crossvalidate import Budget, choose_budget, simple_average
from sewa_cli.solvers.equal import any_of
from sewa_cli.solvers.expect import expect
from sewa_cli.solvers.linear import relax
from sewa_cli.solvers.linear.build import Keep, Linearising
from sewa_cli.solvers.linear.outputs import WARNINGS, Labels
from sewa_cli.solvers.linear.relax import Solution
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.solvers.linear.survey import EXTRA, QUARTERS, Survey
from sewa_cli.text import finite, or_inf, with_K

SCOUTED: tuple[Name, ...] = (
    ("last", None),
    ("uniform", None),
)  # both are at hand after the first read
SMALL = 0.01  # of the loss: an error that nobody would act on


class Linear(Surveyor):
    """Chooses among predicted outputs: a few reads of the checkpoints, forward passes only."""

    class Settings(Linearising):
        rounds: Annotated[Whole, Field(ge=1, le=10)] = Field(
            2, description="1: linearised at the mean of all; 2: once more at the average found"
        )
        iterations: Count = Field(
            100, description="of projected gradient, at most; no checkpoint is read"
        )
        swaps: CountOrNone = Field(50, description="tried in output space before it is given up")
        folds: Annotated[Whole, Field(ge=2)] = Field(
            5, description="of the selection rows, for K: auto"
        )

    needs = frozenset({"value", "outputs"})
    reading = "streamed"
    finds_k = True
    settings: Settings

    def prepare(self, problem: Problem) -> None:
        self._search(problem)

    def _search(self, problem: Problem) -> _Search:
        """What every K shares: what the survey has found, and the first cache."""
        if "search" not in problem.kept:
            search = problem.trajectory.settled(lambda: _Search(self.settings, problem))
            search.cache, _ = search.survey.first()
            problem.kept["search"] = search
        found: _Search = problem.kept["search"]
        return found

    def surveyed(self, problem: Problem) -> Surrogate:
        """The first cache, for whoever searches over it."""
        cache = self._search(problem).cache
        assert cache is not None
        return cache

    def choose_by(self, cache: Surrogate, problem: Problem, K: int) -> Choice:  # noqa: ARG002
        found = relax.solve(cache, K, self.settings.iterations, self.settings.swaps)
        return Choice.of(found.selected, cache.k, probabilities=found.relaxed.tolist())

    def choose(self, problem: Problem, K: int) -> Choice:
        """K of the checkpoints, or as many as cross-validation finds best."""
        if problem.one_of_many:
            return self._search(problem).find(K, None)
        trajectory = problem.trajectory
        search = trajectory.settled(lambda: _Search(self.settings, problem, K))
        return self._choice(search, K).but(examples=search.survey.examples)

    def _choice(self, search: _Search, K: int) -> Choice:
        k, scouted, trajectory = search.k, search.survey.scouted, search.problem.trajectory
        # not to be read again for the references
        trajectory.remember(mean_of(range(k), k), scouted.uniform)
        trajectory.remember(mean_of([k - 1], k), scouted.last)
        if K == AUTO:
            return search.find_K()
        search.cache, losses, _ = search.with_simple_averages()
        simple = search.known(losses)
        if any_will_do := any_of(search.problem, losses, K):
            return any_will_do.but(simple=simple)
        return search.find(K, search.labels(search.cache)).but(simple=simple)

    def plan(self, sizes: Sizes) -> Plan:
        k, keep, is_auto = sizes.k, Keep.of(self.settings, "linear"), sizes.K == AUTO
        averages = family(k, sizes.K)
        wanted = len(averages) - len(SCOUTED)
        summed = _fits(wanted * sizes.vector, sizes.room)
        counting, framing = keep.passes(sizes)
        mixed = (grid(k)[-1] if is_auto else sizes.K) / k
        sure = 0 if is_auto else 1
        again = Stage("outputs", k + framing, reads=1 + mixed, at_least=sure)
        late = Stage("baselines", len(averages), reads=ceil(len(averages) / sizes.at_once))
        held = wanted * sizes.vector * summed
        cache, share = keep.fit(sizes, held, EXTRA + wanted * is_auto)
        stages = [
            Stage("reading", counting + QUARTERS + 1, reads=1),
            Stage("outputs", k + framing, reads=1),
            Stage("baselines", len(SCOUTED) * (2 - is_auto) + wanted * summed),
            *[Stage("learning"), again] * (self.settings.rounds - 1),
            Stage("learning"),
            Stage("checking the result", 1, reads=mixed, at_least=sure),
            *[late] * (not summed),
        ]
        return Plan(stages, held + cache, share)


def _fits(sums: int, room: int) -> bool:
    """Return whether there is room to sum up the weights of all baselines."""
    return sums <= room // 4


class _Search:
    """The choice among the outputs of one problem."""

    def __init__(self, settings: Linear.Settings, problem: Problem, K: int | None = None) -> None:
        """`K`: what will be chosen, beside simple averages; None: any, and without them."""
        self._settings = settings
        self.problem = problem
        self.k = k = problem.trajectory.k
        if K not in (None, AUTO) and k <= K:
            raise ConfigError(
                f"K: {K} of {k} checkpoints leaves nothing to choose; K must be at most {k - 1}"
            )
        others = {} if K is None else family(k, K)
        self._wanted = {name: c for name, c in others.items() if name not in SCOUTED}
        self._keeps = K == AUTO  # their outputs
        vectors = len(self._wanted) * 4 * problem.trajectory.layout.size
        self._has_true_ones = _fits(vectors, problem.room)
        self.survey = Survey(
            problem,
            settings.h,
            Keep.of(settings, "linear"),
            extra=EXTRA + len(self._wanted) * self._keeps,
            held=vectors * self._has_true_ones,
        )
        self.cache: Surrogate | None = None  # around the scouted base

    def find(self, K: int, labels: Labels | None) -> Choice:
        """Round by round; what has the lowest true loss is kept."""
        settings, survey, alone = self._settings, self.survey, not self.problem.one_of_many
        here = self.cache
        assert here is not None
        if alone:
            self.cache = None  # one cache at a time, unless it is kept for others
        starts = [Choice(simple_average(name, K, self.k)).selected for name in ("lawa", "latest")]
        found = self._solve(here, K, starts)
        base_loss, base = survey.scouted.loss, _name_of(survey.scouted.members, self.k)
        rounds: list[dict[str, object]] = []
        best: tuple[float, Solution] | None = None

        def finish_round(predicted: float, loss: float) -> None:
            about = {"base": base, "base_loss": base_loss, "predicted": predicted, "loss": loss}
            rounds.append(about)

        for _ in range(settings.rounds - 1):
            predicted = here.loss_of_mean(found.selected)
            flat = survey.mix(found.selected)
            del here
            here = survey.around(flat)
            loss = here.loss(here.base)
            finish_round(predicted, loss)
            if best is None or loss < best[0]:
                best = (loss, found)
            base, base_loss = "the average found", loss
            found = self._solve(here, K, [found.selected])
        with self.problem.events.stage("checking the result"):
            loss = survey.loss_of_mean(found.selected)
        finish_round(here.loss_of_mean(found.selected), loss)
        if best is not None and best[0] < loss:
            loss, found = best
        selected = found.selected
        error = here.loss_of_mean(selected) - loss
        if alone:
            self._warn_of_error(error, loss)
        return Choice.of(
            selected,
            self.k,
            probabilities=found.relaxed.tolist(),
            history=found.history,
            labels=labels,
            holds=here.size.bytes,
            details={
                "rounds": rounds,
                "cache": asdict(here.size),
                "surrogate_error": error,
                "loss": loss,
            },
        )

    def find_K(self) -> Choice:
        """Learned masks of every size beside the simple averages, cross-validated."""
        settings, problem = self._settings, self.problem
        here, losses, simple = self.with_simple_averages()
        known = self.known(losses)
        if any_will_do := any_of(problem, losses, AUTO):
            return any_will_do.but(simple=known)
        budget = choose_budget(here, simple, settings, problem)
        if budget.labels != "matter":
            problem.events.warn(WARNINGS[budget.labels])
        option, size = budget.options[budget.chosen], here.size
        if option.name == LEARNED:
            assert option.K is not None
            self.cache = here
            del here, simple  # one cache at a time
            chosen = self.find(option.K, budget.labels)
            other = min((o for o in budget.options if o.name != LEARNED), key=lambda o: o.loss)
            if chosen.details["loss"] < other.loss:
                first = chosen.details["rounds"][0]  # as far off as the same cache was at first
                expected = self._expected(budget, first["predicted"] - first["loss"])
                return chosen.but(budget=_options(budget), simple=known, expected=expected)
            # what was predicted has not come true
            problem.events.warn(
                f"the learned average's true selection loss is {chosen.details['loss']:.5g}, no "
                f"better than the {other.name} average's {other.loss:.5g}, which is taken"
            )
            option, nested = other, budget.nested
            nested = nested and replace(nested, taken=nested.simple)
            budget = replace(budget, chosen=budget.options.index(other), nested=nested)
        return Choice(
            simple_average(option.name, option.K, self.k),
            with_K(option.name, option.K),
            labels=budget.labels,
            budget=_options(budget),
            expected=self._expected(budget),
            simple=known,
            holds=size.bytes,
            details={"rounds": [], "cache": asdict(size)},
        )

    def _expected(self, budget: Budget, error: float = 0.0) -> Expected | None:
        """`error`: by which predictions of masks are off."""
        nested = budget.nested
        if nested is None or not bool(torch.isfinite(nested.taken).all()):
            return None
        taken = nested.taken - error * nested.is_learned
        simple = nested.simple if self._has_true_ones else None
        return expect(taken, simple, nested.weights, self.problem.seed)

    def labels(self, here: Surrogate) -> Labels:
        references = self._references(here)
        outputs = [here.base, references["uniform"], references["last"]]
        found = here.outputs.labels(outputs, self.problem.seed)
        if found != "matter":
            advice = "; choose by other data" if found == "noise" else ""
            self.problem.events.warn(f"{WARNINGS[found]}{advice}")
        return found

    def _references(self, here: Surrogate) -> dict[str, Tensor]:
        """True outputs [O] of the newest checkpoint and of the mean of all."""
        scouted = self.survey.scouted
        flats = {"last": scouted.last, "uniform": scouted.uniform}
        return {name: self.survey.outputs(here, flat) for name, flat in flats.items()}

    def with_simple_averages(self) -> tuple[Surrogate, dict[Name, float], dict[Name, Tensor]]:
        """The first cache; losses of simple averages, true ones where there is room to sum them up.

        Their outputs [O] too, if they are to be kept. The weights of the best one are remembered:
        it will be scored as a reference.
        """
        problem, wanted = self.problem, self._wanted
        here, sums = self.survey.first(wanted if self._has_true_ones else {})
        losses: dict[Name, float] = {}
        outputs: dict[Name, Tensor] = {
            (name, None): out for name, out in self._references(here).items()
        }
        told = problem.events.over("baselines", wanted.items(), len(wanted))
        for name, coefficients in told:
            if name in sums:
                out = self.survey.outputs(here, sums[name])
            else:
                out = here.mix(torch.tensor(coefficients, dtype=torch.float64))
            losses[name] = here.loss(out)
            if self._keeps:
                outputs[name] = out
        losses |= {name: here.loss(outputs[name]) for name in SCOUTED}
        best = min(losses, key=lambda name: or_inf(losses[name]))
        if best in sums:
            problem.trajectory.remember(wanted[best], sums[best])
        return here, losses, outputs

    def known(self, losses: dict[Name, float]) -> dict[Name, float] | None:
        """None if they are predicted: then all are run, where W is at hand."""
        return losses if self._has_true_ones else None

    def _solve(self, here: Surrogate, K: int, starts: Sequence[Sequence[int]]) -> Solution:
        iterations, swaps = self._settings.iterations, self._settings.swaps
        return relax.solve(here, K, iterations, swaps, starts, events=self.problem.events)

    def _warn_of_error(self, error: float, loss: float) -> None:
        """A prediction that is off by more than what was gained has chosen by luck."""
        gained = self.survey.scouted.uniform_loss - loss
        if abs(error) > max(abs(gained), SMALL * abs(loss)):
            self.problem.events.warn(
                f"the predicted loss of the choice is off by {error:.3g}, more than the "
                f"{gained:.3g} it gained over the mean of all: predictions are poor on this run; "
                "--solver gumbel may do better"
            )


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


register("linear", Linear)
