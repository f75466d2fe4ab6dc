"""The solver: checkpoints are read and run, their averages weighed, and the result looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.errors import CheckpointError, TaskError
from sewa_cli.methods import Coefficients, mean_of
from sewa_cli.methods.family import Name, family, ladder
from sewa_cli.report.select import Blend, Pulled, Share
from sewa_cli.settings import AUTO, Whole
from sewa_cli.solvers import (
    LEARNED,
    Choice,
    Plan,
    Predicting,
    Problem,
    Sizes,
    Stage,
    register,
)
from sewa_cli.solvers.aggregate.estimate import (
    FAR_AHEAD,
    Estimate,
    Prior,
    are_few,
    behind_in_errors,
    estimate,
    without_crumbs,
)
from sewa_cli.solvers.aggregate.ladder import FEWEST_RUNGS, climb, fall, rungs
from sewa_cli.solvers.equal import EQUAL, are_equal, taken
from sewa_cli.solvers.expect import expect
from sewa_cli.solvers.linear.build import Keep, Linearising, build, count, frame, settle
from sewa_cli.solvers.linear.outputs import NOISE, WARNINGS, Labels, Outputs
from sewa_cli.solvers.linear.pull import STRENGTHS
from sewa_cli.solvers.linear.surrogate import Size, Surrogate
from sewa_cli.solvers.linear.survey import QUARTERS
from sewa_cli.solvers.linear.units import Units
from sewa_cli.text import finite, or_inf, with_K

# where checkpoints are fewer than these and their outputs digested, runs of the model are most of
# the work: the default then climbs so many rungs, and runs so many of the other baselines
DEAR, SPARED_RUNGS, TRIED = 50, 6, 2
FEWEST = 10  # rows, or batches where the loss does not split: fewer cannot be cross-validated
CONVEX = 2.0  # standard errors by which π may be worse than its rungs are in the mean
SAME = 1e-6  # of a weight, or of the loss: a difference by rounding
SMALL = 0.002  # of the loss: a prediction that is further off is made anew, where it led to


class Aggregate(Predicting):
    """The default: weights on all checkpoints, between moving averages and what the data want."""

    class Settings(Linearising):
        rounds: Annotated[Whole, Field(ge=1, le=10)] = Field(
            2, description="at most: linearised anew where less came true than was predicted"
        )
        folds: Annotated[Whole, Field(ge=3, le=10)] = Field(
            5, description="of the selection rows, for cross-validation"
        )

    needs = frozenset({"value", "outputs"})
    reading = "streamed"
    finds_k, takes_k = True, False
    settings: Settings

    def choose(self, problem: Problem, K: int) -> Choice:
        """Weights on all that help; K is auto."""
        if K != AUTO:
            raise ValueError(f"K must be auto, found {K}")
        search = problem.trajectory.settled(lambda: _Search(self.settings, problem))
        return search.find().but(examples=search.examples)

    def choose_by(self, cache: Surrogate, problem: Problem, K: int) -> Choice:  # noqa: ARG002
        """From a cache alone: simple averages are predicted like all others."""
        units = Units(cache.outputs, cache.base)
        averages = {name: _vector(c) for name, c in family(cache.k).items()}
        losses = {name: units.losses(cache.mix(c)) for name, c in averages.items()}
        rungs = [name for name in ladder(cache.k) if name in averages]
        if len(units) < FEWEST:
            best = min(rungs, key=lambda name: units.mean(losses[name]))
            return Choice(averages[best].tolist())
        prior = _prior(rungs, averages, losses)
        every = torch.stack(list(losses.values()))
        found = estimate(cache, units, prior, every, self.settings.folds, problem)
        return Choice(found.coefficients.tolist())

    def plan(self, sizes: Sizes) -> Plan:
        k, keep, rounds = sizes.k, Keep.of(self.settings, "aggregate"), self.settings.rounds
        runs = _Baselines.fitting(k, sizes.vector, sizes.room, keep.digests(sizes.classes))
        counting, framing = keep.passes(sizes)
        others = TRIED if runs.spares else len(runs.summed)
        checking = Stage("checking the result", 1, reads=1)
        again = [
            Stage("outputs", k + 1, reads=1, at_least=0),
            Stage("learning", at_least=0),
            replace(checking, at_least=0),
        ]
        late = len(runs.averages)
        cache, share = keep.fit(sizes, runs.held * sizes.vector)
        stages = [
            Stage("reading", 2 * counting + framing, reads=1),
            Stage("moving averages", runs.climbed - 1),
            Stage("outputs", k + 2, reads=1),
            Stage("baselines", others, reads=others * runs.spares),
            Stage("learning"),
            checking,
            *again * (rounds - 1),
            *[replace(stage, is_rare=True) for stage in again] * rounds,  # from the best baseline
            *[Stage("baselines", late, reads=ceil(late / sizes.at_once))] * (not runs.are_known),
        ]
        return Plan(stages, runs.held * sizes.vector + cache, share)


@dataclass(frozen=True)
class _Baselines:
    """The baselines that are run, and those whose weights are held."""

    averages: dict[Name, Coefficients]
    rungs: list[Name]  # moving averages, grown while the checkpoints are read at first
    parts: int  # of the run, whose means grow with them
    others: list[Name]
    summed: list[Name]  # the others, summed up while the checkpoints are read again
    spares: bool  # passes are most of the work: the others that are predicted best are run

    @classmethod
    def fitting(cls, k: int, vector: int, room: int, is_digest: bool) -> _Baselines:
        """Choose them by what there is room for."""
        spares = is_digest and k < DEAR
        most = room // 4 // vector - QUARTERS
        parts = QUARTERS * (most >= FEWEST_RUNGS and k >= 2 * QUARTERS and not spares)
        most = min(most, SPARED_RUNGS) if spares else most
        averages = family(k)
        found = [name for name in rungs(k, max(FEWEST_RUNGS, most)) if name in averages]
        others = [name for name in averages if name not in found]
        has_room = not spares and vector * len(others) <= room // 4
        return cls(averages, found, parts, others, others if has_room else [], spares)

    @property
    def climbed(self) -> int:
        return len(self.rungs) + self.parts

    @property
    def held(self) -> int:
        """Return how many vectors of weights are held at once."""
        return self.climbed + len(self.summed)

    @property
    def are_known(self) -> bool:
        """Return whether their losses need no further pass."""
        return self.spares or len(self.summed) == len(self.others)


@dataclass(frozen=True)
class _Learned:
    """What the rounds around one prior came to."""

    found: Estimate
    first: Estimate  # of the first round: what was pulled how far
    loss: float  # true, on the selection rows
    error: float  # by which the prediction was off
    rounds: list[dict[str, float | None]]
    cache: Size
    prior: Prior


class _Search:
    """The averages of one problem's checkpoints: their weights [P], and their losses by unit."""

    def __init__(self, settings: Aggregate.Settings, problem: Problem) -> None:
        self._settings = settings
        trajectory = problem.trajectory
        self.k = k = trajectory.k
        if k < 2:
            raise CheckpointError("only one checkpoint is whole; there is nothing to choose")
        vector = 4 * trajectory.layout.size
        keep = Keep.of(settings, "aggregate")
        counted = count(problem, keep)
        runs = _Baselines.fitting(k, vector, problem.room, counted.targets is not None)
        self._averages = {name: _vector(c) for name, c in runs.averages.items()}
        self._rungs, self._others, self._summed = runs.rungs, runs.others, runs.summed
        self._spares, self._held = runs.spares, vector * runs.held
        problem = replace(problem, room=problem.room - self._held)
        self._problem, examples = settle(problem, counted, keep)
        problem, self.examples = self._problem, self._problem.objective.selection
        self._flats, parts = climb(problem, self._rungs, runs.parts > 0)
        uniform = self._flats["uniform", None]
        if examples.targets is None:  # a loss that is broken, or changes its batch, is told now
            problem.objective.learning_value(uniform)
        self._framed, there = frame(problem, examples, uniform, keep)
        told = problem.events.over("moving averages", self._flats.items(), len(self._flats))
        outputs = {name: there if flat is uniform else self._framed.at(flat) for name, flat in told}
        finite_ones = [out for out in outputs.values() if isfinite(self._framed.loss(out))]
        if not finite_ones:
            raise TaskError(
                "loss() is NaN or Inf on the selection data for every checkpoint average"
            )
        self._units = Units(self._framed, finite_ones[0])
        self._losses = {name: self._units.losses(outputs[name]) for name in self._rungs}
        part_losses = {name: self._units.losses(outputs[name]) for name in parts}
        self._fall = fall(parts, part_losses, self._units.weights)
        counting = parts if self._may_count(part_losses) else {}
        self._parts = {name: _vector(mean_of(some, self.k)) for name, some in counting.items()}
        self._prior = _prior(
            [*self._rungs, *self._parts],
            self._averages | self._parts,
            self._losses | part_losses,
        )
        probed = [outputs["last", None], outputs["uniform", None], outputs[self._best()]]
        self._labels: Labels = "matter"
        if self._units.by_row and not self._few:  # so few cannot tell noise from labels
            self._labels = self._framed.labels(probed, problem.seed)
        for name in (("last", None), ("uniform", None)):  # not to be read again for the references
            trajectory.remember(self._averages[name].tolist(), self._flats[name])

    def _may_count(self, parts: Mapping[Name, Tensor]) -> bool:
        """By few rows the best of four parts of the run is ahead by luck: it must be far ahead."""
        weights = self._units.weights
        if not parts or not are_few(self._units):
            return True
        best = min(parts.values(), key=self._units.mean)
        every = torch.stack([*self._losses.values(), best])
        return float(behind_in_errors(every, weights)[:-1].min()) > FAR_AHEAD

    def find(self) -> Choice:
        if reason := self._nothing_to_learn():
            return self._simple_one(reason)
        if self._labels != "matter":
            self._problem.events.warn(WARNINGS[self._labels])
        lead = min([*self._rungs, *self._parts], key=self._loss_of)
        lead_flat, lead_loss = self._flats[lead], self._loss_of(lead)
        found = self._learn(self._survey(*self._base()))
        if found.loss > lead_loss + SMALL * abs(lead_loss):
            # worse on its own rows than what was run before: that lies too far from π to be
            # predicted from there, and was not far enough ahead to be π. From there, then
            parts = torch.zeros_like(self._prior.parts)
            self._prior = replace(self._prior, sharpest=True, parts=parts)
            again = self._learn(self._survey(lead_flat, self._framed.around(lead_flat)))
            found = min(again, found, key=lambda learned: learned.loss)
        return self._choice(found)

    def _loss_of(self, name: Name) -> float:
        """Of a rung, or a part of the run."""
        place = [*self._rungs, *self._parts].index(name)
        return self._units.mean(self._prior.losses[place])

    def _learn(self, here: Surrogate) -> _Learned:
        """Round by round from the cache around π; π itself if no prediction has come true."""
        problem, units, h = self._problem, self._units, self._settings.h
        everything = torch.stack(list(self._losses.values()))
        start = here.loss(here.base)  # of the prior
        rounds: list[dict[str, float | None]] = []
        found: Estimate | None = None
        first: Estimate | None = None  # what was pulled how far; later rounds go on from there
        best: tuple[float, float, Estimate] | None = None
        while True:
            answers = None if found is None else found.answers
            found = estimate(
                here, units, self._prior, everything, self._settings.folds, problem, answers
            )
            first = first or found
            predicted = here.loss(here.mix(found.coefficients))
            with problem.events.stage("checking the result"):
                flat = problem.trajectory.mix_few(found.coefficients.tolist())
                loss = or_inf(here.true_loss(flat))
            seen = {"base": here.loss(here.base), "predicted": predicted, "loss": loss}
            rounds.append({name: finite(value) for name, value in seen.items()})
            if best is None or loss < best[0]:
                best = (loss, predicted - loss, found)
            is_close = abs(predicted - loss) <= SMALL * abs(loss)
            if is_close or len(rounds) == self._settings.rounds:
                break
            del here  # one cache at a time
            flat = flat.clone()
            here = build(problem, flat, h, framed=self._framed.around(flat))
            here.centre(found.coefficients)
        loss, error, found = best
        if not loss <= start + SAME * abs(start):  # what was predicted has not come true
            problem.events.warn(
                f"the learned weights' true selection loss is {loss:.5g}, no better than the "
                f"{start:.5g} of the moving averages that they were learned from, which are taken"
            )
            alone = torch.eye(len(first.path), dtype=torch.float64)[0]
            found = first = replace(
                first,
                coefficients=without_crumbs(first.prior),
                nested=first.before,
                path=alone,
            )
            loss, error = start, 0.0
        return _Learned(found, first, loss, error, rounds, here.size, self._prior)

    def _choice(self, learned: _Learned) -> Choice:
        found, first, error = learned.found, learned.first, learned.error
        units, weights = self._units, self._units.weights
        nested = found.nested - error  # as far off as the answer's own prediction
        c, shares = found.coefficients, learned.prior.shares(weights)
        prior = shares @ learned.prior.rungs
        c = self._rung_alone(shares, float((c - prior).abs().sum() / 2), c)
        strengths = (None, *STRENGTHS)
        simple = (n for n, s in self._averages.items() if float((c - s).abs().max()) <= SAME)
        name = next(simple, None)
        return Choice(
            c.tolist(),
            LEARNED if name is None else with_K(*name),
            labels=self._labels,
            simple=self._simple(),
            spares=self._spares,
            # else the best may be one that was not run
            expected=expect(
                nested, found.simple if self._knows_the_best else None, weights, self._problem.seed
            ),
            blend=Blend(
                prior=[
                    Share(name=name, K=K, share=share)
                    for (name, K), share in zip(
                        (*self._rungs, *self._parts), shares.tolist(), strict=True
                    )
                ],
                path=[
                    Pulled(
                        strength=strength,
                        loss=finite(float(first.validated[i])),
                        behind=finite(float(first.behind[i])),
                        error=finite(float(first.error[i])),
                        share=float(first.path[i]),
                    )
                    for i, strength in enumerate(strengths)
                ],
                weights=prior.tolist(),
                effective=float(1 / (c @ c)),
                learned=float((c - prior).abs().sum() / 2),
            ),
            fall=self._fall,
            holds=learned.cache.bytes + self._held,
            details={
                "rounds": learned.rounds,
                "cache": asdict(learned.cache),
                "surrogate_error": error,
                "units": len(units),
                "by_row": units.by_row,
            },
        )

    def _rung_alone(self, shares: Tensor, moved: float, c: Tensor) -> Tensor:
        """The one rung that weights c [k] have come from, if learning has `moved` nothing of it.

        Short of its crumbs it would be judged as a choice, which it is not.
        """
        first = int(shares.argmax())
        is_one = first < len(self._rungs) and float(shares[first]) > 1 - Blend.UNMOVED
        is_it = is_one and moved < Blend.UNMOVED and are_few(self._units)
        return self._averages[self._rungs[first]] if is_it else c

    def _nothing_to_learn(self) -> str | None:
        """Why a simple average must do."""
        if self._labels == "noise":
            return NOISE
        losses = torch.stack(list(self._losses.values()))
        if are_equal(losses, within=1e-9):  # rungs grow out of equal weights without rounding
            return EQUAL
        if self._few:
            split = "" if self._units.by_row else " (loss() does not split into rows)"
            return (
                f"cross-validation takes {FEWEST} {self._units.kind} of selection data, found "
                f"{len(self._units)}{split}"
            )
        return None

    @property
    def _few(self) -> bool:
        return len(self._units) < FEWEST

    def _simple_one(self, reason: str) -> Choice:
        """The mean of all, or the best rung where there is anything to tell it by."""
        best = self._best() if self._few and reason != EQUAL else ("uniform", None)
        self._problem.events.warn(taken(reason, best))
        return Choice(
            self._averages[best].tolist(),
            with_K(*best),
            labels=self._labels,
            simple=self._simple(),
            spares=self._spares,
            equal=reason == EQUAL,
            fall=self._fall,
            details={"rounds": [], "units": len(self._units), "by_row": self._units.by_row},
        )

    def _base(self) -> tuple[Tensor, tuple[Outputs, Tensor]]:
        """π's weights [P], and the rows with their outputs there.

        Where there is a hill between the rungs, those of the best.
        """
        shares = self._prior.shares(self._units.weights)
        names = [*self._rungs, *self._parts]
        base = torch.zeros_like(self._flats["uniform", None])
        for name, share in zip(names, shares.tolist(), strict=True):
            base.add_(self._flats[name], alpha=share)
        # of a convex loss, the mean of averages is at least as good as they are in the mean
        means = (shares[:, None] * self._prior.losses)[shares > 0].sum(0)
        framed = self._framed.around(base)
        both = torch.stack([means, self._units.by(framed[0]).losses(framed[1])])
        if not float(behind_in_errors(both, self._units.weights)[1]) <= CONVEX:
            self._prior = replace(self._prior, sharpest=True)
            best = self._flats[names[int(shares.argmax())]].clone()
            return best, self._framed.around(best)
        return base, framed

    def _survey(self, base: Tensor, framed: tuple[Outputs, Tensor]) -> Surrogate:
        """The cache around the prior; the rest of the family is summed up on the way, and run.

        Where there is no room for its sums it is left out: far from the base, predictions are poor.
        Where runs are dear, the best of them by prediction are run.
        """
        problem = self._problem
        left = [name for name in self._summed if name not in self._losses]
        sums = {name: torch.zeros_like(base) for name in left}

        def add(i: int, row: Tensor) -> None:
            for name, total in sums.items():
                if (weight := float(self._averages[name][i])) != 0:
                    total.add_(row, alpha=weight)

        here = build(problem, base, self._settings.h, on_row=add, framed=framed)
        here.centre(self._prior.shares(self._units.weights) @ self._prior.rungs)
        if self._spares:
            sums = {
                name: problem.trajectory.mix_few(self._averages[name].tolist()).clone()
                for name in self._promising(here)
            }
        for name, flat in problem.events.over("baselines", sums.items(), len(sums)):
            self._losses[name] = self._units.losses(self._framed.at(flat))
        best, there = self._best(), self._flats | sums
        if best in there:
            problem.trajectory.remember(self._averages[best].tolist(), there[best])
        self._flats = {}
        return here

    def _promising(self, here: Surrogate) -> list[Name]:
        """Of those that were not run, the best by prediction."""
        left = [name for name in self._others if name not in self._losses]
        if len(left) < len(self._others):  # run around another base before
            return []
        predicted = self._units.losses_of(here, torch.stack([self._averages[n] for n in left]))
        means = dict(zip(left, map(self._units.mean, predicted), strict=True))
        return sorted(left, key=means.__getitem__)[:TRIED]

    def _best(self) -> Name:
        return min(self._losses, key=lambda name: self._units.mean(self._losses[name]))

    @property
    def _knows_the_best(self) -> bool:
        """Whether all simple averages were run, or those that may be the best."""
        return self._spares or len(self._losses) == len(self._averages)

    def _simple(self) -> dict[Name, float] | None:
        """None if some could not be run: then they are, where W is at hand."""
        if not self._knows_the_best:
            return None
        return {name: self._units.mean(losses) for name, losses in self._losses.items()}


def _prior(
    names: Sequence[Name], averages: Mapping[Name, Tensor], losses: Mapping[Name, Tensor]
) -> Prior:
    return Prior(
        torch.stack([averages[name] for name in names]),
        torch.stack([losses[name] for name in names]),
        torch.tensor([name[0].startswith("quarter") for name in names]),
    )


def _vector(coefficients: Coefficients) -> Tensor:
    return torch.tensor(coefficients, dtype=torch.float64)


register("aggregate", Aggregate)
