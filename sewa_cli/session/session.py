"""What one command with a task has opened: files, model, names, data. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sewa_cli import checkpoints as library
from sewa_cli import ranks
from sewa_cli.checkpoints import Checkpoint, Reads
from sewa_cli.config import AUTO, Config
from sewa_cli.dtypes import DTYPES, WORDS, torch_dtype
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.events import Events
from sewa_cli.methods import Coefficients
from sewa_cli.methods.family import Name, family
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Data, Objective
from sewa_cli.objective.overlap import find_overlap
from sewa_cli.objective.scorer import Scored, Scorer
from sewa_cli.objective.tree import rows
from sewa_cli.output.average import Average, taking_part
from sewa_cli.output.destination import paths_of
from sewa_cli.output.lora import warn_of_factors
from sewa_cli.report.select import Guard
from sewa_cli.report.shared import Candidate, Placement
from sewa_cli.session import check_names, heading, open_candidates, warn_of_no_steps
from sewa_cli.session.building import build_objective, guarded, with_whole_batches
from sewa_cli.session.cost import Clock, peak_memory
from sewa_cli.session.extensions import (
    make_solver,
    solver_for,
    solvers_that_serve,
)
from sewa_cli.session.rows import CheckpointRows
from sewa_cli.solvers import Choice, Problem, Sizes, Solver
from sewa_cli.task import Task
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.placement import Placed, Placer, cap_on


@dataclass(frozen=True)
class Session:
    config: Config
    task: Task
    events: Events
    checkpoints: list[Checkpoint]
    names: Mapping[str, str]  # model name → checkpoint name
    objective: Objective
    reads: Reads
    inputs: list[Path]  # never to be overwritten
    guard: Guard | None = None
    clock: Clock = field(default_factory=Clock)
    found: int = 0  # checkpoints, of which some take part

    @property
    def model(self) -> FlatModel:
        return self.objective.model

    @property
    def device(self) -> torch.device:
        """Return where the work is done."""
        return self.model.device

    @property
    def newest(self) -> Checkpoint:
        return self.checkpoints[-1]

    def scorer(self) -> Scorer:
        dtype, task, mode = self.config.output_dtype, self.task, self.config.bn
        if mode == "auto" and not task.has_loss and task.training_data is None:
            mode = "off"  # there is nothing to take statistics over
        infos = {name: self.newest.tensors[source] for name, source in self.names.items()}
        words = {n: WORDS[dtype] if dtype and i.is_float else i.dtype for n, i in infos.items()}
        return Scorer(
            self.objective,
            task.heldout_data,
            task.training_data,
            task.metrics if self.config.objective.metric is None else None,
            {name: torch_dtype(DTYPES[word]) for name, word in words.items()},
            mode,
        )

    def floats(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a row of W, by the layout's names."""
        for name, source in self.names.items():
            if checkpoint.tensors[source].is_float:
                yield self.model.canonical(name), checkpoint.read(source, self.model.part(name))

    def load_integers(self, checkpoint: Checkpoint) -> None:
        named = [(n, s) for n, s in self.names.items() if not checkpoint.tensors[s].is_float]
        if named:
            self.model.load((name, checkpoint.read(source)) for name, source in named)

    def warn_of_overlap(self, training: bool) -> None:
        """Of rows that are in two sets of data at once; of training rows if they are at hand."""
        task = self.task
        with self.events.stage("looking for rows in two sets"):
            found = find_overlap(
                task.selection_data,
                task.heldout_data,
                task.training_data
                if training or task.files
                else None,  # a ready-made task has them
                self.config.seed,
            )
        for sentence in found:
            self.events.warn(sentence)

    def head(self) -> dict[str, Any]:
        """What the report of a command with a task begins with."""
        head = heading(self.config, self.events, task=self.task.source, device=self.device)
        return {**head, "code": self.task.sha256, "parameters": self.model.parameters}

    def report(
        self,
        used: Sequence[Checkpoint],
        choice: Choice | None = None,
        weights: Coefficients | None = None,
    ) -> dict[str, Any]:
        """That, the checkpoints that took part, and what it has cost so far."""
        probabilities = choice.probabilities if choice else None
        candidates = [
            Candidate(
                index=i,
                path=str(c.path),
                step=c.step,
                weight=weights[i] if weights else None,
                probability=probabilities[i] if probabilities else None,
                logged=c.metrics or None,
            )
            for i, c in enumerate(used)
        ]
        passes, memo = self.objective.passes, self.objective.memo
        memo.report(self.events)
        cost = self.clock.cost(self.model.device, passes, self.reads, memo.recalled)
        return {**self.head(), "candidates": candidates, "cost": cost}


def open_session(config: Config, task: Task, events: Events) -> Session:
    """Headers are read, the model is built, names are matched; no tensor is read yet."""
    guard, clock, task = None, Clock(), with_whole_batches(task)
    if config.guard is not None and config.objective.metric is None:  # else it is of parts
        if task.heldout_data is not None:
            raise ConfigError(f"--guard: {task.source} has heldout_data already; drop one of them")
        task, guard = guarded(task, config.guard, config.seed)
    reads = Reads()
    candidates, found = open_candidates(config, events, reads)
    check_names(config, task.source)
    objective = build_objective(config, task, candidates, events)
    model = objective.model
    names = library.match_names(candidates[-1], model.aliases, model.shapes, model.layout.slices)
    library.check_tied(candidates[-1], model.aliases)
    inputs = [*paths_of(found), Path(task.source), *task.files]
    warn_of_no_steps(candidates, events)
    assumed = config.objective.assumption
    for text in ([assumed] if assumed else []) + [*task.warnings]:
        events.warn(text)
    return Session(
        *(config, task, events, candidates, names, objective, reads, inputs, guard, clock),
        found=len(found),
    )


def check_budget(K: int, checkpoints: Sequence[Checkpoint]) -> None:
    """There must be something to choose. K: AUTO is always possible."""
    k = len(checkpoints)
    if k == 1:
        raise CheckpointError(
            f"{checkpoints[0].path}: is the only checkpoint; there is nothing to choose"
        )
    if k <= K:
        raise ConfigError(
            f"K: {K} of {k} checkpoints leaves nothing to choose; K must be at most {k - 1}"
        )


class Run:
    """The checkpoints placed as W, and averages of them: in the model, scored, and as files.

    `retry` runs work that begins with `read`, and again with W in a lower tier if memory runs out.
    """

    def __init__(
        self,
        session: Session,
        solver: Solver,
        share: float = 1.0,
        stream: bool = True,
    ) -> None:
        """`stream`: W need not be held, if the solver does without. `share`: of memory, for W."""
        config = session.config
        self.session = session
        self.solver = solver
        self.rows = CheckpointRows(session)
        self.scorer = session.scorer()
        cap = cap_on(session.device, config.memory, ranks.here())
        events, tier, here = session.events, config.tier, ranks.here()
        self.placer = Placer(
            *(self.rows, cap, solver.vectors, events, share, tier, here, self.rows.settle)
        )
        self.retry = self.placer.retry
        self.streams = stream and solver.reading == "streamed" and tier is None
        self._loaded: tuple[tuple[float, ...], int] | None = None
        self._known: dict[tuple[float, ...], tuple[float, int]] = {}

    @property
    def knows_simple(self) -> bool:
        """Whether `simple_losses` are those of files, if W is exact: none of them is rounded."""
        floats = [dtype for dtype in self.scorer.dtypes.values() if dtype.is_floating_point]
        as_is = all(dtype == torch.float32 for dtype in floats)
        return as_is and not self.session.objective.batch_statistics

    def read(self) -> Placed:
        """W wherever it fits; for a solver that only passes over it, as a stream not yet read."""
        self.placed: Placed = None  # type: ignore[assignment] # what memory ran out with goes first
        self.placed = self.placer.stream() if self.streams else self.placer.place()
        self.session.load_integers(self.session.newest if self.streams else self.used[-1])
        self._loaded = None
        self._known.clear()
        return self.placed

    @property
    def trajectory(self) -> Trajectory:
        return self.placed.trajectory

    @property
    def used(self) -> list[Checkpoint]:
        return [self.session.checkpoints[i] for i in self.trajectory.used]

    def problem(self, room: int | None = None, one_of_many: bool = False) -> Problem:
        objective, config = self.session.objective, self.session.config
        left = self.placed.room if room is None else room
        events, trajectory = self.session.events, self.trajectory
        steps = [checkpoint.step for checkpoint in self.used]
        return Problem(objective, trajectory, left, config.seed, events, one_of_many, steps)

    def load(self, coefficients: Sequence[float]) -> None:
        """An average into the model, rounded as a file of it would be.

        From W, or, where W is not exact, from the files.
        """
        model = self.session.model
        if (tuple(coefficients), model.version) == self._loaded:
            return
        if self.trajectory.exact:
            self.scorer.load(self.trajectory.mix_few(coefficients))
            newest = max(i for i, c in enumerate(coefficients) if c != 0)
            self.session.load_integers(self.used[newest])  # as in a file: the newest's
        else:
            dtype, names = self.session.config.output_dtype, self.session.names
            average = Average(*taking_part(self.used, coefficients), names, dtype)
            tensors = average.parts(model.part)
            model.load(self.session.events.over("averaging", tensors, len(names)))
        self._loaded = (tuple(coefficients), model.version)

    def at_once(self, room: int) -> int:
        """Simple averages that are mixed in one pass over W."""
        return Sizes(0, 0, 0, room, 4 * self.placer.sizes.P).at_once

    def simple_losses(self, K: int) -> dict[Name, float]:
        """Selection losses of the simple averages, as many at a time as there is room for."""
        averages, objective = family(self.trajectory.k, K), self.session.objective
        names, at_once = list(averages), self.at_once(self.placed.room)
        found: list[float] = []

        def look_at(some: list[Name]) -> None:
            weights = torch.tensor([averages[name] for name in some], dtype=torch.float64)
            for name, flat in zip(some, self.trajectory.mix(weights), strict=True):
                self.session.events.progress("baselines", len(found), len(averages))
                if self.knows_simple and self.trajectory.exact:
                    self.session.model.set(flat)
                    known = objective.mean_loss(objective.selection)
                    self._known[tuple(averages[name])] = known
                    found.append(known[0])
                else:
                    found.append(objective.learning_value(flat))
            self.session.events.progress("baselines", len(found), len(averages))

        for start in range(0, len(names), at_once):
            look_at(names[start : start + at_once])  # what it holds goes with it
        self._loaded = None
        return dict(zip(names, found, strict=True))

    def choose_examples(self, examples: Data) -> None:
        """Take selection losses on these examples alone: not all of them may have chosen."""
        self.session.objective.selection = examples

    def know(self, losses: Mapping[tuple[float, ...], float]) -> None:
        """Selection losses of averages that a solver has run: not to be run again.

        Of weights that W has rounded they are not those of a file.
        """
        if self.knows_simple and self.trajectory.exact:
            n = sum(map(rows, self.session.objective.selection))
            self._known |= {average: (loss, n) for average, loss in losses.items()}

    def score(self, coefficients: Sequence[float]) -> Scored:
        """An average that is not written; BatchNorm as for a file of it."""
        self.load(coefficients)
        if self.scorer.recomputes_for(sum(c != 0 for c in coefficients)):
            self.scorer.recompute()
        return self.scorer.score(self._known.get(tuple(coefficients)))

    def average(self, coefficients: Sequence[float], method: str, K: int | None = None) -> Average:
        """As a file of it will be, but for BatchNorm."""
        names, config = self.session.names, self.session.config
        average = Average.of(self.used, coefficients, names, config=config, method=method, K=K)
        warn_of_factors(average.lora, self.session.events)
        return average

    def score_file(self, average: Average) -> tuple[Average, Scored]:
        """The very tensors that will be written; recomputed statistics are put into it."""
        model = self.session.model
        parts = average.parts(model.part)
        model.load(self.session.events.over("averaging", parts, len(average.names)))
        scored = self.scorer.score_average(len(average.sources))
        return average.with_statistics(scored.statistics), scored

    def report(
        self, choice: Choice | None = None, weights: Coefficients | None = None
    ) -> dict[str, Any]:
        """What every report over one W says of it; `weights`: of the average that is written."""
        self._hear_all()
        return {
            **self.session.report(self.used, choice, weights),
            "k": self.trajectory.k,
            "left_out": self.rows.left_out,
            "placement": holding(self.placed.placement, choice.holds if choice else 0),
            "standing": self.rows.standing(self.trajectory.used, choice.fall if choice else None),
        }

    def _hear_all(self) -> None:
        """What other ranks had to say, each once; what each has read and held."""
        here, session = ranks.here(), self.session
        if not here.several:
            return
        self.rows.settle()
        own = session.events.warnings, session.reads.bytes, peak_memory()
        for rank, (warnings, read, held) in enumerate(here.gather(own)):
            session.events.note(f"rank {rank}: {read} bytes read, {held} held at most")
            for text in warnings:
                session.events.warn(text)


def holding(placement: Placement, more: int) -> Placement:
    """With so many bytes more, which the solver holds."""
    return placement.model_copy(update={"planned_bytes": placement.planned_bytes + more})


def chosen_solver(config: Config) -> Solver:
    """With its settings; refused now if it cannot do what it is asked for."""
    name = solver_for(config, config.K)
    solver = make_solver(config, name)
    metric = config.objective.metric
    if ("parts" in solver.needs) != (metric is not None):
        raise ConfigError(
            f"solver: {name} chooses by a metric; name one: --metric NAME"
            if metric is None
            else f"solver: {name} chooses by the loss, not by --metric {metric}; "
            f"{_others(config)} would do"
        )
    if config.K == AUTO and not solver.finds_k:
        raise ConfigError(f"K: auto needs a solver that finds K: {_others(config)}; or name a K")
    if config.K != AUTO and not solver.takes_k:
        raise ConfigError(f"K: {config.K}, but {name} weighs all checkpoints; leave out --K")
    if config.sparse and metric is not None:
        raise ConfigError("sparse: is for a choice by the loss; by a metric, name a K: --K 10")
    if config.sparse and config.K != AUTO:
        raise ConfigError(f"sparse: finds K itself, and K is {config.K}; leave out one of them")
    if config.sparse and not solver.takes_k:
        raise ConfigError(f"sparse: {name} weighs all checkpoints; leave out --solver {name}")
    return solver


def _others(config: Config) -> str:
    return " or ".join(f"--solver {name}" for name in solvers_that_serve(config))
