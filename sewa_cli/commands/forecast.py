"""`sewa select --dry-run`: the plan of a run, and its time by one batch through the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from math import ceil, prod
from typing import Any

import torch

from sewa_cli.commands.select import open_setup
from sewa_cli.config import Config
from sewa_cli.dtypes import DTYPES
from sewa_cli.errors import TaskError
from sewa_cli.events import Events
from sewa_cli.objective.tree import rows, tensors
from sewa_cli.report.kinds import Forecast, PlannedStage
from sewa_cli.rng import seeded
from sewa_cli.session.extensions import solver_for
from sewa_cli.session.run import Counts, Setup, holding, stages_of
from sewa_cli.session.session import peak_memory
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Plan, Sizes
from sewa_cli.task import Task

SHORT = 0.5  # seconds: work that takes less is timed more than twice


def run_forecast(config: Config, task: Task, events: Events | None = None) -> Forecast:
    """Read the newest checkpoint, time one batch with it, and multiply by the plan."""
    with seeded(config.seed):
        return _forecast(open_setup(config, task, events or Events()))


def _forecast(setup: Setup) -> Forecast:
    session, objective, K = setup.session, setup.session.objective, setup.session.config.K
    k, flat = len(session.checkpoints), objective.model.flat
    tier = None if setup.streams else setup.placer.fitting()[0]
    placement, room = setup.placer.plan(tier)
    found = [(batch, n) for batch in session.task.selection_data if (n := rows(batch)) > 0]
    if not found:
        raise TaskError("selection_data(): there are no batches with examples in them")
    examples, counts = sum(n for _, n in found), Counts.of(session)

    batch, n = found[0]
    setup.rows.fill(k - 1, flat)
    objective.model.set(flat)
    session.load_integers(session.newest)
    forward = _seconds(lambda: objective.mean_loss([batch]))
    sizes = _sizes(setup, counts, batch, examples / n, room)
    own = setup.solver.plan(sizes)
    plan = own or Plan(())
    stages = stages_of(setup, plan, sizes, tier)
    through = sum(map(counts.forward, stages))
    backward = counts.selection * sum(stage.backward for stage in stages)
    both = _seconds(lambda: objective.gradient(flat, [batch])) if backward else forward

    names, tensors_of = session.names.values(), session.newest.tensors
    size = sum(prod(tensors_of[n].shape) * DTYPES[tensors_of[n].dtype].itemsize for n in names)
    products = sum(stage.products for stage in stages)
    reads = sum(stage.reads for stage in stages) + (tier.reads(products) if tier else 0)
    is_cuda = session.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(session.device) if is_cuda else peak_memory()
    placement = holding(placement, plan.bytes)
    return Forecast(
        **session.head(),
        solver=solver_for(session.config, K),
        K="auto" if K == AUTO else K,
        found=session.found,
        k=k,
        selection_rows=examples,
        rows_used=round(examples * plan.share),
        placement=placement,
        peak_memory_bytes=peak + placement.planned_bytes,
        bytes_read=ceil(k * size * reads / session.ranks.size),
        is_declared=own is not None,
        stages=[PlannedStage(**asdict(stage)) for stage in stages],
        forward_passes=ceil(through),
        at_least=int(sum(counts.forward(stage) * stage.at_least for stage in stages)),
        backward_passes=ceil(backward),
        batch_seconds=forward,
        seconds=plan.share * (through * forward + backward * max(0.0, both - forward)),
    )


def _sizes(setup: Setup, counts: Counts, batch: Any, times: float, room: int) -> Sizes:
    """Return what a plan depends on; `times`: as many rows are in all batches as in this one."""
    session, objective, vector = setup.session, setup.session.objective, 4 * setup.placer.sizes.P
    k, K = len(session.checkpoints), session.config.K
    sizes = Sizes(k, K, counts.selection, room, vector)
    if "outputs" not in setup.solver.needs:
        return sizes
    targets = objective.targets(batch)
    if targets is not None and objective.classes is not None:
        many = int(len(targets.where) * times)
        return replace(sizes, targets=many, classes=objective.classes.width)
    with torch.no_grad():
        outputs = tensors(objective.outputs(batch))
    numbers = sum(x.numel() for x in outputs if x.is_floating_point())
    return replace(sizes, numbers=int(numbers * times))


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest of a few times: the first pays for caches, and any may be disturbed."""
    found: list[float] = []
    while len(found) < 2 or (len(found) < 5 and sum(found) < SHORT):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
