"""A session's checkpoints placed as W: the plan, and the result."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint, with_tied
from sewa_cli.checkpoints.means import counts_of
from sewa_cli.dtypes import Array, as_array
from sewa_cli.errors import CheckpointError, TaskError
from sewa_cli.events import Planned
from sewa_cli.methods import Coefficients, Run
from sewa_cli.methods.fixed import baselines
from sewa_cli.objective.objective import Data
from sewa_cli.objective.scorer import Scorer
from sewa_cli.output.average import Average
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.report.shared import Candidate, LeftOut, Placement, Standing
from sewa_cli.rng import seeded
from sewa_cli.scores import BASELINE_BATCHES, AverageScores, has_learning_losses
from sewa_cli.session.session import Session, peak_memory
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Plan, Problem, Sizes, Solver, Stage
from sewa_cli.trajectory import Trajectory, fill_row
from sewa_cli.trajectory.geometry import WeightSample
from sewa_cli.trajectory.placement import TIERS, Placed, Placer, Tier, cap_on

BY_NUMPY = (torch.float32, torch.float64, torch.bfloat16)


class CheckpointRows:
    """The session's checkpoints as rows of W; one with NaN or Inf is left out, or stops the run."""

    def __init__(self, session: Session) -> None:
        self.layout = session.model.layout
        self.device = session.device
        self.count = len(session.checkpoints)
        self._end = max(where.stop for where in self.layout.slices.values())
        self._session = session
        self._sample = WeightSample(self.count, self._end)
        self._broken: dict[int, str | None] = {}  # of those that were read: what is wrong with them
        self._mapped: _MappedColumns | None = None

    @property
    def left_out(self) -> list[LeftOut]:
        return [
            LeftOut(path=str(c.path), step=c.step, reason=f"{self._broken[i]} holds NaN or Inf")
            for i, c in enumerate(self._session.checkpoints)
            if self._broken.get(i) is not None
        ]

    def standing(self, used: Sequence[int]) -> Standing | None:
        """Return where the run stands, by a sample that was kept as they were read."""
        steps = [self._session.checkpoints[i].step for i in used]
        return self._sample.standing(used, steps, self._session.ranks)

    @property
    def gather(self) -> Callable[[Sequence[int], slice, Tensor], None] | None:
        """Return `gather` if every checkpoint can be mapped; they stay mapped."""
        if self._mapped is None:
            self._mapped = _MappedColumns(self._session)
        if not self._mapped.is_whole:
            return None
        for checkpoint in self._session.checkpoints:
            checkpoint.check_unchanged()
        return self._mapped.gather

    def settle(self) -> bool:
        """Let all ranks leave out the same ones; return False if one has not, until now."""
        found = [
            {i: why for i, why in one.items() if why is not None}
            for one in self._session.ranks.gather(self._broken)
        ]
        every = {i: why for one in reversed(found) for i, why in one.items()}
        self._broken |= every
        return all(one.keys() == every.keys() for one in found)

    def fill(self, i: int, row: Tensor) -> bool:
        session, checkpoint = self._session, self._session.checkpoints[i]
        is_new = i not in self._broken
        if not is_new:  # looked through already; now it must only be the same
            checkpoint.check_unchanged()
        broken = fill_row(row, session.floats(checkpoint), self.layout, check=is_new)
        row[self._end :].zero_()
        checkpoint.close()
        if not is_new:
            return self._broken[i] is None
        self._broken[i] = broken
        session.events.progress("reading", len(self._broken), self.count)
        if broken is not None:
            reason = f"{broken} holds NaN or Inf"
            if session.config.nonfinite == "error":
                raise CheckpointError(
                    f"{checkpoint.path}: {reason}; --set nonfinite=skip leaves it out"
                )
            session.events.warn(f"{checkpoint.path}: left out: {reason}")
            if len(self.left_out) == self.count:
                raise CheckpointError(f"all {self.count} checkpoints hold NaN or Inf; none is left")
        else:
            self._sample.keep(i, row)
        return broken is None


class _MappedColumns:
    """Columns of W straight from the mapped files, widened to float32 on the way."""

    def __init__(self, session: Session) -> None:
        model, layout = session.model, session.model.layout
        sources = {model.canonical(name): source for name, source in session.names.items()}
        ordered = sorted(layout.slices, key=lambda name: layout.slices[name].start)
        self._reads = session.reads
        self._runs: list[_Runs] = []
        for checkpoint in session.checkpoints:
            found = [
                (layout.slices[name].start, checkpoint.runs(sources[name], model.part(name)))
                for name in ordered
            ]
            checkpoint.close()  # what is mapped stays so, without a descriptor
            if any(runs is None for _, runs in found):
                break
            self._runs.append(
                _Runs([(start + at, view) for start, runs in found for at, view in runs or ()])
            )
        self.is_whole = len(self._runs) == len(session.checkpoints)

    def gather(self, chosen: Sequence[int], columns: slice, out: Tensor) -> None:
        """Columns of these checkpoints into out [r, c]."""
        numbers, read = out.numpy(), 0
        for row, i in enumerate(chosen):
            for here, part in self._runs[i].parts(columns.start, columns.stop):
                if isinstance(part, Tensor):
                    out[row, here].copy_(part)
                else:
                    numbers[row, here] = part
                read += part.nbytes
        self._reads.add(read)


class _Runs:
    """One checkpoint: views of its files, and the columns that each fills."""

    def __init__(self, views: Sequence[tuple[int, Tensor]]) -> None:
        full = [(start, view) for start, view in views if view.numel()]
        self._starts = [start for start, _ in full]
        self._ends = [start + view.numel() for start, view in full]
        # NumPy copies with less ado; float16 and less torch widens faster
        self._views = [as_array(v) if v.dtype in BY_NUMPY else v for _, v in full]

    def parts(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor | Array]]:
        """Yield where among these columns each view begins and ends, and its part there."""
        n = bisect_right(self._ends, start)
        while n < len(self._starts) and (at := self._starts[n]) < stop:
            begin, end = max(at, start), min(self._ends[n], stop)
            yield slice(begin - start, end - start), self._views[n][begin - at : end - at]
            n += 1


@dataclass(frozen=True)
class Setup:
    """A session, its solver, and where W can be.

    streams  W need not be held: the solver passes over the checkpoints
    """

    session: Session
    solver: Solver
    scorer: Scorer
    rows: CheckpointRows
    placer: Placer
    streams: bool

    def place(self) -> PlacedRun:
        """Read the checkpoints into W wherever it fits; a stream is not read yet."""
        session = self.session
        placed = self.placer.stream() if self.streams else self.placer.place()
        session.load_integers(
            session.newest if self.streams else session.at(placed.trajectory.used)[-1]
        )
        return PlacedRun(self, placed, AverageScores(session, self.scorer, placed))


def set_up(session: Session, solver: Solver, *, share: float = 1.0, stream: bool = True) -> Setup:
    """Plan for W, which has a share of memory; `stream`: if the solver does without, so do we."""
    config, here = session.config, session.ranks
    rows = CheckpointRows(session)
    placer = Placer(
        rows,
        cap_on(session.device, config.memory, here),
        solver.vectors,
        session.events,
        share,
        config.tier,
        here,
        rows.settle,
    )
    streams = stream and solver.reading == "streamed" and config.tier is None
    return Setup(session, solver, session.scorer(), rows, placer, streams)


@dataclass(frozen=True)
class PlacedRun:
    """The checkpoints placed as W, and what averages of them score."""

    setup: Setup
    placed: Placed
    scores: AverageScores

    @property
    def session(self) -> Session:
        return self.setup.session

    @property
    def solver(self) -> Solver:
        return self.setup.solver

    @property
    def trajectory(self) -> Trajectory:
        return self.placed.trajectory

    @property
    def used(self) -> list[Checkpoint]:
        return self.session.at(self.trajectory.used)

    def on(self, examples: Data) -> PlacedRun:
        """Return this run with its losses taken of these examples alone."""
        objective = replace(self.session.objective, selection=examples)
        session = replace(self.session, objective=objective)
        scorer = session.scorer()
        scores = AverageScores(session, scorer, self.placed, self.scores.ledger)
        return PlacedRun(replace(self.setup, session=session, scorer=scorer), self.placed, scores)

    def problem(self, room: int | None = None, one_of_many: bool = False) -> Problem:
        session = self.session
        return Problem(
            session.objective,
            self.trajectory,
            self.placed.room if room is None else room,
            session.config.seed,
            session.events,
            one_of_many,
            [checkpoint.step for checkpoint in self.used],
            counts_of(self.used),
        )

    def for_methods(self, **loss: Any) -> Run:
        steps, seed = [checkpoint.step for checkpoint in self.used], self.session.config.seed
        return Run.at(steps, seed, counts=counts_of(self.used), **loss)

    def average(self, coefficients: Sequence[float], method: str, K: int | None = None) -> Average:
        """Return the average as a file of it will be, but for BatchNorm."""
        session, config = self.session, self.session.config
        names = with_tied(session.names, session.newest, session.objective.model.aliases)
        average = Average.of(self.used, coefficients, names, config=config, method=method, K=K)
        warn_of_factors(average.lora, session.events)
        return average

    def report(self, weights: Coefficients | None = None, holds: int = 0) -> dict[str, Any]:
        """Return what every report over one W says; `holds`: bytes of the solver next to W."""
        rows = self.setup.rows
        hear_all(self.session, rows)
        candidates = [
            Candidate(
                index=i,
                path=str(c.path),
                step=c.step,
                mean_steps=c.mean_steps,
                weight=weights[i] if weights else None,
                logged=c.metrics or None,
            )
            for i, c in enumerate(self.used)
        ]
        return {
            **self.session.head(),
            "candidates": candidates,
            "cost": self.session.cost,
            "k": self.trajectory.k,
            "left_out": rows.left_out,
            "placement": holding(self.placed.placement, holds),
            "standing": rows.standing(self.trajectory.used),
        }


def hear_all(session: Session, rows: CheckpointRows) -> None:
    """Collect the warnings of all ranks, each once; note what each has read and held."""
    here = session.ranks
    if not here.several:
        return
    rows.settle()
    own = session.events.warnings, session.reads.bytes, peak_memory()
    for rank, (warnings, read, held) in enumerate(here.gather(own)):
        session.events.note(f"rank {rank}: {read} bytes read, {held} held at most")
        for text in warnings:
            session.events.warn(text)


def holding(placement: Placement, more: int) -> Placement:
    return placement.model_copy(update={"planned_bytes": placement.planned_bytes + more})


BACK = 2  # forward passes that take as long as a backward pass
SCORED = 4  # the choice, the best baseline, the newest checkpoint and the mean of all


@dataclass(frozen=True)
class Counts:
    """The number of batches in each set of data."""

    selection: int
    heldout: int
    training: int  # for BatchNorm

    @classmethod
    def of(cls, session: Session) -> Counts:
        task, training = session.task, 0
        with seeded(session.config.seed):  # a loader that shuffles does so alike each time
            selection = task.selection_data.count()
            heldout = task.heldout_data.count() if task.heldout_data else 0
            if session.scorer().recomputes:
                training = task.training_data.count() if task.training_data else selection
        if not selection:
            raise TaskError("selection_data(): there are no examples")
        return cls(selection, heldout, training)

    def forward(self, stage: Stage) -> float:
        found = stage.passes * self.selection + stage.heldout * self.heldout
        return found + stage.training * self.training


def stages_of(setup: Setup, own: Plan, sizes: Sizes, tier: Tier | None) -> list[Stage]:
    """Return the solver's own stages with those of `select` around them; no tier: W is streamed."""
    k, K, is_held = sizes.k, sizes.K, setup.solver.reading == "held"
    streams = tier is None or tier.reads(1) > tier.reads(0)
    holds = tier is not None and tier.holds
    share, anew = 1.0 if K == AUTO else K / k, int(setup.scorer.recomputes_for(2))
    is_exact = holds or streams
    has_all = is_held and sizes.batches <= BASELINE_BATCHES
    is_known = has_all and is_exact and has_learning_losses(setup.session, setup.scorer)
    stages = [stage if streams else replace(stage, reads=0) for stage in own.stages]
    if is_held:
        averages = len(baselines(k, K))
        passes = averages * min(1.0, BASELINE_BATCHES / sizes.batches)
        products = ceil(averages / sizes.at_once)
        stages.insert(0, Stage("baselines", passes, products=products))
    stages.append(
        Stage(
            "scoring",
            passes=1 + anew + (SCORED - 1) * (not is_known),
            heldout=SCORED + anew,
            training=(SCORED - 1) * anew,
            reads=share + (not holds) * (1 + is_held),
            at_least=0.3,  # the choice may be a baseline, and the best one the mean of all
        )
    )
    if setup.session.config.fallback:
        once = 1 + anew
        stages.append(Stage("fallback", once, 0, once, anew, reads=1 + share, at_least=0))
    return [*stages, Stage("writing", reads=share)]


def follow(run: PlacedRun, K: int) -> None:
    session, objective, room = run.session, run.session.objective, run.placed.room
    counts, k = Counts.of(session), run.trajectory.k
    classes = inf if objective.classes else 0  # the task says targets() where they are many
    vector = 4 * run.trajectory.layout.size
    sizes = Sizes(k, K, counts.selection, room, vector, classes=classes)
    if (own := run.solver.plan(sizes)) is None:
        return
    tier = next(tier for tier in TIERS if tier.name == run.placed.placement.tier)
    passes, back = objective.passes, BACK * counts.selection
    session.events.follow(
        [
            Planned(stage.name, counts.forward(stage) + back * stage.backward)
            for stage in stages_of(run.setup, own, sizes, None if run.setup.streams else tier)
        ],
        lambda: passes.forward + BACK * passes.backward,
    )
