"""Place a session's checkpoints as W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sewa_cli.checkpoints import Checkpoint, with_tied
from sewa_cli.checkpoints.means import counts_of
from sewa_cli.methods import Coefficients, Run
from sewa_cli.objective.objective import Data
from sewa_cli.opening import Session, peak_memory
from sewa_cli.output.average import Average
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.report.shared import Candidate, Placement, heading
from sewa_cli.rows import CheckpointRows
from sewa_cli.scores import AverageScores
from sewa_cli.solvers import Problem, Solver
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.placement import Placer, cap_on


@dataclass(frozen=True)
class Setup:
    """A session, its solver, and where W can be."""

    session: Session
    solver: Solver
    rows: CheckpointRows
    placer: Placer

    def place(self) -> PlacedRun:
        """Read the checkpoints into W wherever it fits; a stream is not read yet."""
        session, placed = self.session, self.placer.place()
        W, last = placed.trajectory, -1 if self.placer.streams else placed.trajectory.used[-1]
        session.load_integers(session.checkpoints[last])
        scores = AverageScores(session, W, placed.room)
        return PlacedRun(session, self.rows, W, placed.placement, placed.room, scores)


def set_up(session: Session, solver: Solver, *, share: float = 1.0, stream: bool = True) -> Setup:
    """Plan for W, which has a share of memory; `stream`: if the solver does without, so do we."""
    config, here = session.config, session.model.ranks
    rows = CheckpointRows(session)
    placer = Placer(
        rows,
        cap_on(session.model.device, config.memory, here),
        solver.vectors,
        session.events,
        share,
        config.tier,
        here,
        rows.settle,
        streams=stream and solver.reading == "streamed" and config.tier is None,
    )
    return Setup(session, solver, rows, placer)


@dataclass(frozen=True)
class PlacedRun:
    """The checkpoints placed as W, and what averages of them score.

    room  bytes under the cap on memory that W leaves
    """

    session: Session
    rows: CheckpointRows
    trajectory: Trajectory
    placement: Placement
    room: int
    scores: AverageScores

    @property
    def used(self) -> list[Checkpoint]:
        """Return the checkpoints that are whole; of a stream, all until it was read."""
        return [self.session.checkpoints[i] for i in self.trajectory.used]

    def on(self, examples: Data) -> PlacedRun:
        """Return this run with its losses taken of these examples alone."""
        session = self.session.on(examples)
        return replace(self, session=session, scores=self.scores.on(session))

    def problem(self, room: int | None = None, one_of_many: bool = False) -> Problem:
        session = self.session
        return Problem(
            session.objective,
            self.trajectory,
            self.room if room is None else room,
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
        session = self.session
        names = session.names
        if session.model.has_ties:
            names = with_tied(names, session.newest, session.model.aliases)
        average = Average.of(
            self.used, coefficients, names, config=session.config, method=method, K=K
        )
        if average.lora is not None:
            warn_of_factors(average.lora, session.events)
        return average

    def report(self, weights: Coefficients | None = None, holds: int = 0) -> dict[str, Any]:
        """Return what every report over one W says; `holds`: bytes of the solver next to W."""
        session, W = self.session, self.trajectory
        if session.model.ranks.several:
            hear_all(session, self.rows)
        steps, ranks = [c.step for c in self.used], session.model.ranks
        planned = self.placement.planned_bytes + holds
        return {
            **heading(session.config, session.events, session.task, session.model.device),
            "parameters": session.model.parameters,
            "candidates": list_candidates(self.used, weights),
            "cost": session.cost(),
            "k": W.k,
            "left_out": self.rows.left_out(),
            "placement": self.placement.model_copy(update={"planned_bytes": planned}),
            "standing": self.rows.sample.standing(W.used, steps, ranks),
        }


def list_candidates(
    checkpoints: Sequence[Checkpoint], weights: Coefficients | None
) -> list[Candidate]:
    return [
        Candidate(
            index=i,
            path=c.name,
            step=c.step,
            mean_steps=c.mean_steps,
            weight=weights[i] if weights else None,
            logged=c.metrics or None,
        )
        for i, c in enumerate(checkpoints)
    ]


def hear_all(session: Session, rows: CheckpointRows) -> None:
    """Collect the warnings of all ranks, each once; note what each has read and held."""
    rows.settle()
    own = session.events.warnings, session.reads.bytes, peak_memory()
    for rank, (warnings, read, held) in enumerate(session.model.ranks.gather(own)):
        session.events.note(f"rank {rank}: {read} bytes read, {held} held at most")
        for text in warnings:
            session.events.warn(text)
