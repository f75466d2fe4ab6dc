"""`sewa select --dry-run`: what the run will read, hold and compute, before it does.

The solver and the tier say what they cost; here it is added up, for the solver that was asked for
and for the others. Seconds are extrapolated from one checkpoint read and one batch put through the
model. Of a model that does not fit here nothing is read and nothing run (`session/rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch

from sewa_cli.checkpoints import Checkpoint, TensorInfo, pairs
from sewa_cli.commands.select import ALWAYS, open_run
from sewa_cli.config import AUTO, Config
from sewa_cli.dtypes import DTYPES
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods.family import family
from sewa_cli.objective.batchnorm import batchnorm_layers
from sewa_cli.objective.model import find_device
from sewa_cli.objective.sharding import blocks
from sewa_cli.objective.tree import rows
from sewa_cli.report.forecast import Forecast, Plan
from sewa_cli.rng import seeded
from sewa_cli.session.extensions import make_solver, solver_for
from sewa_cli.session.rates import Measured, Rates, Reckoned, anonymous_bytes
from sewa_cli.session.session import Run, Session, holding
from sewa_cli.settings import USUAL
from sewa_cli.solvers import BUILTIN, Cost, Sizes, Solver
from sewa_cli.task import Task
from sewa_cli.text import size
from sewa_cli.trajectory.memory import free_on
from sewa_cli.trajectory.placement import TIERS, Cap, cap_on

BUILT = 12  # bytes for each weight while a model is built: its own, and two flat vectors
STARTING = 0.8  # seconds, imports apart: torch's first calls, the task's own; on the demo
SURE = 4  # such a part of the memory holds the model and any batch
ROOM = 2**30  # bytes for the solver, where nothing fits here


def run_forecast(
    config: Config,
    task: Task,
    events: Events | None = None,
    *,
    shapes_only: bool = False,
    ranks: int = 1,
) -> Forecast:
    """True of a run in which no checkpoint is left out for NaN or Inf.

    `shapes_only`: nothing is read or run, though it would fit. `ranks`: what each of so many will
    take; one process finds it out.
    """
    events = events or Events()
    with seeded(config.seed):
        before = anonymous_bytes()
        run, why = _open(config, task, events, shapes_only)
        opened = run.session.reads.bytes
        session, data = run.session, _Data.of(run.session)
        with events.stage("forecast"):
            rates: Rates = Reckoned(session) if why else Measured(session)
            planner = _Planner(session, data, rates, before, opened, ranks)
            chosen = planner.plan(solver_for(config, config.K), run.solver, config.K)
            others = list(planner.alternatives(chosen.solver))
        return Forecast(
            **session.head(),
            **dict(chosen),
            how=rates.how,
            why=why or "one checkpoint was read, and one batch run",
            k=len(session.checkpoints),
            ranks=ranks,
            selection_rows=data.rows,
            says_targets=task.targets is not None,
            heldout_rows=data.heldout_rows,
            tokens=data.tokens,
            model_bytes=planner.model_bytes,
            batch_bytes=rates.batch_bytes,
            alternatives=others,
        )


def _open(config: Config, task: Task, events: Events, shapes_only: bool) -> tuple[Run, str | None]:
    """With a model that has its weights, unless these and a batch would be too much: why."""
    free = free_on(find_device(config.device))
    limit = min(free, config.memory or free)
    there = f"{size(limit)} {'that --memory allows' if limit < free else 'that are free'}"

    def needs(newest: Checkpoint) -> int:
        floats = [info for info in newest.tensors.values() if info.is_float]
        return BUILT * sum(prod(info.shape) for info in floats)

    if shapes_only:
        return open_run(config, task, events, lambda _: True), "as was asked for"
    run = open_run(config, task, events, lambda newest: SURE * needs(newest) > limit)
    if run.session.model.device.type == "meta":
        total = needs(run.session.newest) + Reckoned(run.session).batch_bytes
        if total > limit:
            why = f"the model and one batch need {size(total)}, more than the {there}"
            return run, f"{why}: nothing was read or run"
        run = open_run(config, task, events)
    return run, None


@dataclass(frozen=True)
class _Data:
    """How many batches and rows each evaluation goes through."""

    batches: int
    rows: int
    heldout_batches: int
    heldout_rows: int | None
    training_batches: int  # for BatchNorm
    tokens: int | None

    @classmethod
    def of(cls, session: Session) -> _Data:
        task = session.task
        counted = [(n, _tokens(batch)) for batch in task.selection_data if (n := rows(batch)) > 0]
        tokens = [count for _, count in counted if count is not None]
        heldout = [n for batch in task.heldout_data or () if (n := rows(batch)) > 0]
        training = 0
        if session.scorer().recomputes:
            data: Iterable[Any] = task.training_data or task.selection_data
            training = sum(1 for _ in data)
        return cls(
            batches=len(counted),
            rows=sum(n for n, _ in counted),
            heldout_batches=len(heldout),
            heldout_rows=None if task.heldout_data is None else sum(heldout),
            training_batches=training,
            tokens=sum(tokens) if len(tokens) == len(counted) else None,
        )


def _tokens(batch: Any) -> int | None:
    """That are not padding; None if the batch is not of tokens."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return None
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


@dataclass(frozen=True)
class _Planner:
    """Adds up what a solver costs."""

    session: Session
    data: _Data
    rates: Rates
    before: int  # bytes of the process without a model
    opened: int  # bytes read of the checkpoints so far
    ranks: int = 1

    @property
    def model_bytes(self) -> int:
        """The flat vectors of weights and gradients; twice, where the model has another dtype.

        Of several ranks: a part of each, FSDP's shards besides, and one block gathered whole, with
        its gradient.
        """
        module, layout = self.session.model.module, self.session.model.layout
        other = [p for p in module.parameters() if p.dtype != torch.float32]
        whole = 4 * (layout.size + layout.parameters) + sum(2 * p.nbytes for p in other)
        if self.ranks == 1:
            return whole
        weights = sum(p.nbytes for p in module.parameters())
        apart = [sum(p.nbytes for p in block.parameters()) for block in blocks(module)]
        gathered = max([weights - sum(apart), *apart])
        return self._part(whole + 2 * weights) + 2 * gathered

    def _part(self, number: int) -> int:
        """A rank's, rounded up."""
        return -(-number // self.ranks)

    def alternatives(self, chosen: str) -> Iterable[Plan]:
        """The other solvers of ours, with the same K where they take it."""
        k = len(self.session.checkpoints)
        for name in BUILTIN:
            if name == chosen:
                continue
            solver, K = make_solver(self.session.config, name), self.session.config.K
            if "parts" in solver.needs:  # what a metric costs only its user knows
                continue
            if K == AUTO and not solver.finds_k:
                K = min(USUAL, k - 1)
            elif not solver.takes_k:
                K = AUTO
            try:
                yield self.plan(name, solver, K)
            except TaskError:  # a loss without a gradient, say
                continue

    def plan(self, name: str, solver: Solver, K: int) -> Plan:
        session, data, k = self.session, self.data, len(self.session.checkpoints)
        device, memory, parts = session.device, session.config.memory, self.ranks
        cap = cap_on(device, memory)
        if memory is None and device.type != "cuda":  # the ranks of a host share what it has
            cap = replace(cap, bytes=cap.bytes // parts)
        run, fits = Run(session, solver, cap=cap, parts=parts), True
        try:
            tier = None if run.streams else run.placer.fitting()[0]
            placement, room = run.placer.plan(tier)
        except ConfigError:
            if self.rates.how == "measured":
                raise
            fits = False
            least = Cap(run.placer.needs(TIERS[-1]) + ROOM, named=True)
            run = Run(session, solver, cap=least, parts=parts)
            tier = None if run.streams else run.placer.fitting()[0]
            placement, room = run.placer.plan(tier)
            reason = f"the least that this takes; the cap here is {cap}, which is too little"
            placement = placement.model_copy(update={"reason": reason})
        rates = self.rates
        cost = solver.cost(
            Sizes(
                k=k,
                K=K,
                batches=data.batches,
                rows=data.rows,
                room=room,
                objective=session.objective,
                batch=rates.batch,
                outputs=lambda: rates.outputs,
                targets=rates.targets,
                classes=rates.classes,
                ranks=parts,
            )
        )
        most = k - 1 if K == AUTO else K
        reads = cost.reads if tier is None else tier.reads(cost.products) * k
        streams = tier is not None and tier.reads(1) > tier.reads(0)
        if streams and solver.reading == "streamed":
            reads += cost.reads  # it remembers the simple averages
        elif tier is not None and not tier.holds:
            reads += 1 + k + k  # last, the mean of all, the best simple one: from the files
            reads += k * ceil(len(family(k, K)) / run.at_once(room)) * streams
        is_exact = streams or (tier is not None and tier.holds)
        passes = _Passes(run, data, cost.knows_simple, is_exact)
        placement = holding(placement, cost.bytes)
        at_work = rates.gradient_bytes if cost.backward else rates.batch_bytes
        at_work = cost.piece + self._part(at_work)
        taken = self._seconds(run, cost, reads, streams, passes.evaluations(most), most)
        return Plan(
            solver=name,
            K="auto" if K == AUTO else K,
            rows_used=data.rows if cost.rows is None else cost.rows,
            placement=placement,
            bytes_read=self._part(self.opened + _bytes(run, reads, most)),
            forward_passes=cost.forward + passes.evaluations(most) + passes.fallback(),
            backward_passes=cost.backward,
            at_most=True,  # which simple average is best, and what scoring it takes, is not known
            peak_memory_bytes=self.before + self.model_bytes + placement.planned_bytes + at_work,
            fits=fits and not cost.too_few,
            too_few=cost.too_few,
            # the solver's own arithmetic is done by each; the rest is shared out
            seconds=cost.seconds + (taken - cost.seconds) / self.ranks,
        )

    def _seconds(
        self, run: Run, cost: Cost, reads: int, streams: bool, evaluated: int, K: int
    ) -> float:
        """`streams`: products with W read the files themselves."""
        session, data, rates, k = run.session, self.data, self.rates, len(self.session.checkpoints)
        batch_rows = data.rows / data.batches
        part = 1.0 if cost.rows is None else cost.rows / data.rows
        by_solver = cost.forward * cost.usual * part * batch_rows
        heldout = min(1.0, data.heldout_batches / max(1, data.heldout_batches + data.batches))
        each = rates.row + heldout * (rates.unit - rates.row)
        total = by_solver * rates.row + evaluated * batch_rows * each
        total += cost.seconds + cost.backward * batch_rows * (
            rates.row_back if cost.backward else 0
        )
        if streams:
            reads -= cost.products * k
            vectors = max(1, run.solver.vectors // 2)  # M samples
            total += cost.products * rates.streamed_product(k, vectors)
        elif cost.products:
            total += cost.products * rates.product(k, max(1, run.solver.vectors // 2))
        written = 2 * K  # evaluated, and written
        again = max(0.0, reads * cost.usual + written - k)
        total += k * rates.first_read + again * rates.read
        newest = session.newest.size
        return STARTING + total + (K + 1) * newest * rates.hashing


class _Passes:
    """Batches through the model that no solver asks for."""

    def __init__(self, run: Run, data: _Data, knows_simple: bool, is_exact: bool) -> None:
        """`knows_simple`: the solver does. `is_exact`: W is in float32, held or streamed."""
        self._run = run
        self._data = data
        self._known = run.knows_simple and (
            knows_simple or (is_exact and run.solver.reading == "held")
        )
        self._scored = data.batches + data.heldout_batches

    def evaluations(self, K: int) -> int:
        """The simple averages, two or three of them scored, then the average.

        At most: the best of them may be one that is scored anyway.
        """
        anew = self._run.scorer.recomputes_for
        simple = [anew(1), anew(2), anew(2)]
        found = len(simple) * self._scored + sum(simple) * self._data.training_batches
        if self._known:
            found -= len(simple) * self._data.batches
        found += self._file(K)
        if self._run.solver.reading == "held":
            k = len(self._run.session.checkpoints)
            found += len(family(k, K)) * self._data.batches
        return found

    def fallback(self) -> int:
        return self._file(2) if self._run.session.config.fallback else 0

    def _file(self, sources: int) -> int:
        """One that is written, before BatchNorm and after."""
        anew = self._run.scorer.recomputes_for(sources)
        return self._scored + anew * (self._data.training_batches + self._scored)


def _bytes(run: Run, reads: int, K: int) -> int:
    """Of tensor data: so many checkpoints, and the K chosen, evaluated and written."""
    session = run.session
    newest, names, config = session.newest, session.names, session.config
    infos = {name: newest.tensors[source] for name, source in names.items()}
    floats = sum(_size(info) for info in infos.values() if info.is_float)
    integers = sum(_size(info) for info in infos.values() if not info.is_float)
    statistics = 0
    if run.scorer.recomputes_for(K):  # recomputed tensors are not read again to be written
        layers = batchnorm_layers(session.model.module).values()
        kept = {session.model.name_of(b) for x in layers for b in (x.running_mean, x.running_var)}
        statistics = sum(_size(i) for n, i in infos.items() if session.model.canonical(n) in kept)
    factors = 0
    if newest.kind == "adapter":  # factors are measured besides; merged ones not averaged again
        pair = [name for both in pairs(newest.tensors) for name in both]
        factors = sum(_size(newest.tensors[name]) for name in pair)
        factors = -factors if config.lora == "merged" else factors
    total = (reads + 2 * K) * floats - K * statistics + K * factors
    total += integers * (1 + len(ALWAYS) + 1 + 2)
    if config.fallback:  # a simple average of all, at most, evaluated and written besides
        k = len(session.checkpoints)
        total += 2 * (k * floats + integers) + k * abs(factors)
    return total


def _size(info: TensorInfo) -> int:
    return int(torch.Size(info.shape).numel()) * DTYPES[info.dtype].itemsize
