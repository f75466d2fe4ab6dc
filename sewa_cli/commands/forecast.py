"""`sewa select --dry-run`: what the run will read, hold and compute, before it does.

The solver and the tier say what they cost; here it is added up. Seconds are extrapolated from one
row read, one block mixed and one batch put through the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import torch

from sewa_cli.checkpoints import TensorInfo, pairs
from sewa_cli.commands.select import ALWAYS, open_run
from sewa_cli.config import AUTO, Config
from sewa_cli.dtypes import DTYPES
from sewa_cli.events import Events
from sewa_cli.methods.family import family
from sewa_cli.objective.batchnorm import batchnorm_layers
from sewa_cli.objective.tree import rows
from sewa_cli.report.forecast import Forecast
from sewa_cli.rng import seeded
from sewa_cli.session.session import Run, holding
from sewa_cli.solvers import Cost, Sizes
from sewa_cli.task import Task
from sewa_cli.trajectory.dense import ROWS, Dense
from sewa_cli.trajectory.streamed import Streamed


def run_forecast(config: Config, task: Task, events: Events | None = None) -> Forecast:
    """True of a run in which no checkpoint is left out for NaN or Inf."""
    with seeded(config.seed):
        run = open_run(config, task, events or Events())
        session, k = run.session, len(run.session.checkpoints)
        tier = None if run.streams else run.placer.fitting()[0]
        streams = tier is not None and tier.reads(1) > tier.reads(0)
        batches = _Batches(run, exact=streams or (tier is not None and tier.holds))
        placement, room = run.placer.plan(tier)
        cost = run.solver.cost(
            Sizes(k, config.K, batches.selection, batches.rows, room, session.objective)
        )
        K = k - 1 if config.K == AUTO else config.K
        reads = cost.reads if tier is None else tier.reads(cost.products) * k
        if streams and run.solver.reading == "streamed":
            reads += cost.reads  # it remembers the simple averages
        elif tier is not None and not tier.holds:
            reads += 1 + k + k  # last, the mean of all, the best simple one: from the files
            reads += k * ceil(len(family(k)) / run.at_once(room)) * streams
        return Forecast(
            **session.head(),
            k=k,
            K="auto" if config.K == AUTO else config.K,
            placement=holding(placement, cost.bytes),
            bytes_read=session.reads.bytes + _bytes(run, reads, K),
            forward_passes=cost.forward + batches.evaluations(K) + batches.fallback(),
            backward_passes=cost.backward,
            at_most=True,  # which simple average is best, and what scoring it takes, is not known
            seconds=_seconds(run, cost, reads, batches.evaluations(K), streams),
        )


class _Batches:
    """How many batches each evaluation goes through."""

    def __init__(self, run: Run, exact: bool) -> None:
        """`exact`: W is in float32, held or streamed."""
        task, self._run, self._exact = run.session.task, run, exact
        counted = [n for batch in task.selection_data if (n := rows(batch)) > 0]
        self.selection, self.rows = len(counted), sum(counted)
        self._scored = self.selection
        if task.heldout_data is not None:
            self._scored += sum(rows(batch) > 0 for batch in task.heldout_data)
        self._trained = 0
        if run.scorer.recomputes:
            data: Iterable[Any] = task.training_data or task.selection_data
            self._trained = sum(1 for _ in data)

    def evaluations(self, K: int) -> int:
        """The simple averages, two or three of them scored, then the average.

        At most: the best of them may be one that is scored anyway.
        """
        anew = self._run.scorer.recomputes_for
        simple = [anew(1), anew(2), anew(2)]
        found = len(simple) * self._scored + sum(simple) * self._trained + self._file(K)
        if self._run.solver.reading == "held":
            if self._run.knows_simple and self._exact:
                found -= len(simple) * self.selection
            found += len(family(len(self._run.session.checkpoints))) * self.selection
        return found

    def fallback(self) -> int:
        return self._file(2) if self._run.session.config.fallback else 0

    def _file(self, sources: int) -> int:
        """One that is written, before BatchNorm and after."""
        anew = self._run.scorer.recomputes_for(sources)
        return self._scored + anew * (self._trained + self._scored)


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


def _seconds(run: Run, cost: Cost, reads: int, evaluations: int, streams: bool) -> float:
    """From one of each: a row read, a block mixed, a batch forward and back.

    `streams`: products with W read the files themselves.
    """
    session = run.session
    layout, device, k = session.model.layout, session.model.device, len(session.checkpoints)
    few = min(k, ROWS if 4 * ROWS * layout.size <= run.placer.sizes.room else 1)
    block = Dense(torch.zeros(few, layout.size, device=device), layout)
    reading = _time(lambda: run.rows.fill(k - 1, block.W[0]))
    batch = next(session.objective.batches())
    forward = _time(lambda: session.objective.mean_loss([batch]))
    total = reads * reading + (cost.forward + evaluations) * forward + cost.seconds
    if cost.backward:
        backward = _time(lambda: session.objective.gradient(block.W[0], [batch])) - forward
        total += cost.backward * max(backward, forward)
    if cost.products:
        a = torch.zeros(max(1, run.solver.vectors // 2), few)  # M samples
        W = Streamed(run.rows, 1, list(range(few))) if streams else block
        total += cost.products * _time(lambda: W.mix(a)) * k / few
        total -= cost.products * k * reading if streams else 0.0
    return total


def _time(work: Callable[[], object]) -> float:
    """The best of three: the first pays for pages and caches, and any may be disturbed."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
