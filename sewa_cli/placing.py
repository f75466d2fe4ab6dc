"""Place a session's checkpoints as W: its rows as they lie in files, the plan, and the result."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sewa_cli.candidates import leave_out
from sewa_cli.checkpoints import Checkpoint, Reads, with_tied
from sewa_cli.checkpoints.means import counts_of
from sewa_cli.dtypes import Array, as_array
from sewa_cli.errors import CheckpointError
from sewa_cli.methods import Coefficients, Run
from sewa_cli.objective.objective import Data
from sewa_cli.opening import Session, peak_memory
from sewa_cli.output.average import Average
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.report.shared import Candidate, LeftOut, Placement, heading
from sewa_cli.scores import AverageScores
from sewa_cli.solvers import Problem, Solver
from sewa_cli.trajectory import Trajectory, fill_row
from sewa_cli.trajectory.geometry import WeightSample
from sewa_cli.trajectory.placement import Placer, cap_on

BY_NUMPY = (torch.float32, torch.float64, torch.bfloat16)
# the first column, the one after the last, and their numbers
Span = tuple[int, int, Tensor | Array]


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
        scores = AverageScores(session, W, placed.memory_left)
        return PlacedRun(session, self.rows, W, placed.placement, placed.memory_left, scores)


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

    memory_left  bytes under the cap on memory that W leaves
    """

    session: Session
    rows: CheckpointRows
    trajectory: Trajectory
    placement: Placement
    memory_left: int
    scores: AverageScores

    @property
    def used(self) -> list[Checkpoint]:
        """Return the checkpoints that are whole; of a stream, all until it was read."""
        return [self.session.checkpoints[i] for i in self.trajectory.used]

    def on(self, examples: Data) -> PlacedRun:
        """Return this run with its losses taken of these examples alone."""
        session = self.session.on(examples)
        return replace(self, session=session, scores=self.scores.on(session))

    def problem(self, one_of_many: bool = False) -> Problem:
        session = self.session
        return Problem(
            session.objective,
            self.trajectory,
            self.memory_left,
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


# ---- rows of W --------------------------------------------------------------------------------


class CheckpointRows:
    """The session's checkpoints as rows of W; one with NaN or Inf is left out, or stops the run.

    sample  some weights of each, kept as they are read: where the run stands
    """

    def __init__(self, session: Session) -> None:
        self.layout = session.model.layout
        self.device = session.model.device
        self.count = len(session.checkpoints)
        self._end = max(where.stop for where in self.layout.slices.values())
        self._session = session
        self.sample = WeightSample(self.count, self._end)
        self._broken: dict[int, str | None] = {}  # of those that were read: what is wrong with them
        self._mapped: MappedColumns | None = None

    def left_out(self) -> list[LeftOut]:
        return [
            LeftOut(path=c.name, step=c.step, reason=f"{self._broken[i]} holds NaN or Inf")
            for i, c in enumerate(self._session.checkpoints)
            if self._broken.get(i) is not None
        ]

    @property
    def gather(self) -> Callable[[Sequence[int], slice, Tensor], None] | None:
        """Return `gather` if every checkpoint can be mapped; they stay mapped."""
        checkpoints = self._session.checkpoints
        if self._mapped is None:
            self._mapped = MappedColumns(self._session.reads)
            for checkpoint in checkpoints:
                if (runs := _map_columns(self._session, checkpoint)) is None:
                    break
                self._mapped.runs.append(runs)
        if len(self._mapped.runs) < self.count:
            return None
        for checkpoint in checkpoints:
            checkpoint.check_unchanged()
        return self._mapped.gather

    def settle(self) -> bool:
        """Let all ranks leave out the same ones; return False if one has not, until now."""
        found = [
            {i: why for i, why in one.items() if why is not None}
            for one in self._session.model.ranks.gather(self._broken)
        ]
        every = {i: why for one in reversed(found) for i, why in one.items()}
        self._broken |= every
        return all(one.keys() == every.keys() for one in found)

    def fill(self, i: int, row: Tensor) -> bool:
        session, checkpoint = self._session, self._session.checkpoints[i]
        is_new = i not in self._broken
        if not is_new:  # looked through already; now it must only be the same
            checkpoint.check_unchanged()
        broken = fill_row(row, floats(session, checkpoint), self.layout, check=is_new)
        row[self._end :].zero_()
        checkpoint.close()
        if not is_new:
            return self._broken[i] is None
        self._broken[i] = broken
        session.events.progress("reading", len(self._broken), self.count)
        if broken is None:
            self.sample.keep(i, row)
            return True
        leave_out(checkpoint, broken, session.config, session.events)
        if len(self.left_out()) == self.count:
            raise CheckpointError(f"all {self.count} checkpoints hold NaN or Inf; none is left")
        return False


def floats(session: Session, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a row of W, by the layout's names."""
    model = session.model
    for name, source in session.names.items():
        if checkpoint.tensors[source].is_float:
            yield model.canonical(name), checkpoint.read(source, model.part(name))


def _map_columns(session: Session, checkpoint: Checkpoint) -> list[Span] | None:
    """Return views of a checkpoint's files in the order of W's columns; None: it has none."""
    model, slices = session.model, session.model.layout.slices
    sources = {model.canonical(name): source for name, source in session.names.items()}
    found: list[Span] = []
    for name in sorted(slices, key=lambda name: slices[name].start):
        views = checkpoint.runs(sources[name], model.part(name))
        if views is None:
            break
        for at, view in views:
            start = slices[name].start + at
            # NumPy copies with less ado; float16 and less torch widens faster
            numbers = as_array(view) if view.dtype in BY_NUMPY else view
            found += [(start, start + view.numel(), numbers)] if view.numel() else []
    checkpoint.close()  # what is mapped stays so, without a descriptor
    return None if views is None else found


@dataclass(frozen=True)
class MappedColumns:
    """Columns of W straight from the mapped files, widened to float32 on the way."""

    reads: Reads
    runs: list[list[Span]] = field(default_factory=list)  # of each checkpoint

    def gather(self, chosen: Sequence[int], columns: slice, out: Tensor) -> None:
        """Columns of these checkpoints into out [r, c]."""
        numbers, read = out.numpy(), 0
        for row, i in enumerate(chosen):
            runs = self.runs[i]
            n = bisect_right(runs, columns.start, key=lambda run: run[1])
            while n < len(runs) and (at := runs[n][0]) < columns.stop:
                begin, end = max(at, columns.start), min(runs[n][1], columns.stop)
                here = slice(begin - columns.start, end - columns.start)
                part = runs[n][2][begin - at : end - at]
                if isinstance(part, Tensor):
                    out[row, here].copy_(part)
                else:
                    numbers[row, here] = part
                read += part.nbytes
                n += 1
        self.reads.add(read)
