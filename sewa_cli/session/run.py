"""A session's checkpoints placed as W: the plan, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.methods import Coefficients
from sewa_cli.objective.objective import Data
from sewa_cli.objective.scorer import Scorer
from sewa_cli.output.average import Average
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.report.shared import Placement
from sewa_cli.scores import AverageScores
from sewa_cli.session.cost import peak_memory
from sewa_cli.session.rows import CheckpointRows
from sewa_cli.session.session import Session
from sewa_cli.solvers import Choice, Problem, Solver
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.placement import Placed, Placer, cap_on


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
        )

    def average(self, coefficients: Sequence[float], method: str, K: int | None = None) -> Average:
        """Return the average as a file of it will be, but for BatchNorm."""
        names, config = self.session.names, self.session.config
        average = Average.of(self.used, coefficients, names, config=config, method=method, K=K)
        warn_of_factors(average.lora, self.session.events)
        return average

    def report(
        self, choice: Choice | None = None, weights: Coefficients | None = None
    ) -> dict[str, Any]:
        """Return what every report over one W says; `weights`: of the average that is written."""
        rows = self.setup.rows
        hear_all(self.session, rows)
        return {
            **self.session.report(self.used, choice, weights),
            "k": self.trajectory.k,
            "left_out": rows.left_out,
            "placement": holding(self.placed.placement, choice.holds if choice else 0),
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
    """Return a placement with `more` bytes, which the solver holds."""
    return placement.model_copy(update={"planned_bytes": placement.planned_bytes + more})
