"""`sewa select --dry-run`: what the run will read, hold and compute, before it does.

Counted from the same sizes and settings that the run goes by; seconds are extrapolated from one
row read, one block mixed and one batch put through the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sewa_cli.checkpoints import TensorInfo, pairs
from sewa_cli.commands.select import REFERENCES
from sewa_cli.config import AUTO, Config
from sewa_cli.dtypes import DTYPES
from sewa_cli.errors import TaskError
from sewa_cli.events import Listener
from sewa_cli.methods import parse
from sewa_cli.objective.objective import batchnorm_layers, cycle
from sewa_cli.objective.split import check_settings, keep_aside
from sewa_cli.objective.tree import rows
from sewa_cli.report.forecast import Forecast
from sewa_cli.rng import seeded
from sewa_cli.session.heading import heading
from sewa_cli.session.session import Bench, set_up
from sewa_cli.solvers.crossvalidate import grid
from sewa_cli.solvers.linear import QUARTERS, Surrogate, build
from sewa_cli.solvers.linear.build import least, usual
from sewa_cli.solvers.linear.streaming import find_room
from sewa_cli.solvers.linear.survey import simple_averages
from sewa_cli.solvers.stability import QUICK
from sewa_cli.task import Task
from sewa_cli.trajectory import ROWS, Trajectory, fill_row
from sewa_cli.trajectory.placement import make_plan

TYPICAL = 50  # iterations of projected gradient, of which each takes about two losses


def run_forecast(config: Config, task: Task, listener: Listener | None = None) -> Forecast:
    with seeded(config.seed):
        check_settings(config, task)
        if config.guard is not None:
            task, _ = keep_aside(task, config.guard, config.seed)
        bench = set_up(config, task, listener or Listener())
        batches = _Batches(bench)
        if config.solver == "linear":
            return _linear_forecast(bench, batches)
        plan = make_plan(bench)
        iterations = config.gumbel.iterations * config.gumbel.samples * config.gumbel.batches
        return Forecast(
            **heading(config, bench.warnings, task=task.source, device=bench.model.device),
            k=len(bench.checkpoints),
            K=config.K,
            parameters=bench.model.layout.parameters,
            placement=plan.placement(plan.tier),
            bytes_read=bench.reads.bytes
            + _bytes(bench, plan.tier, batches.recomputes(config.K))
            + _fallback_bytes(bench),
            forward_passes=iterations + batches.evaluations(config.K) + batches.fallback(),
            backward_passes=iterations,
            at_most=config.fallback,
            seconds=_seconds(bench, plan.tier, batches),
        )


class _Batches:
    """How many batches each evaluation goes through."""

    def __init__(self, bench: Bench) -> None:
        task = bench.task
        self._falls_back = bench.config.fallback
        self._mode = bench.config.bn if batchnorm_layers(bench.model.module) else "off"
        self._has_batchnorm = bool(batchnorm_layers(bench.model.module))
        counted = [n for batch in task.selection_data if (n := rows(batch)) > 0]
        self.selection, self.selection_rows = len(counted), sum(counted)
        self.scored = self.selection
        if task.heldout_data is not None:
            self.scored += _count(task.heldout_data, empty=False)
        self.trained = 0
        if self._mode != "off":
            self.trained = _count(task.training_data or task.selection_data, empty=True)

    def recomputes(self, sources: int) -> bool:
        return self._mode == "on" or (self._mode == "auto" and sources > 1)

    def evaluations(self, K: int) -> int:
        """`last`, `uniform` and `lawa`, then the average, before BatchNorm and after."""
        sources = {"last": 1, "uniform": 2, "lawa": K}  # one, or several
        total = 0
        for call in parse(REFERENCES):
            total += self.scored + self.recomputes(sources[call.label]) * self.trained
        after = self.recomputes(K)
        return total + self.scored + after * (self.trained + self.scored)

    def fallback(self) -> int:
        """One more average evaluated, before BatchNorm and after."""
        if not self._falls_back:
            return 0
        return self.scored + self.recomputes(2) * (self.trained + self.scored)


def _count(data: Iterable[Any], empty: bool) -> int:
    return sum(empty or rows(batch) > 0 for batch in data)


def _linear_forecast(bench: Bench, batches: _Batches) -> Forecast:
    """Scouting, surveying, once more around what was found, and true weights in the end."""
    config, k, B = bench.config, len(bench.checkpoints), batches.selection
    settings = config.linear
    K = config.K if config.K != AUTO else grid(k)[-1]
    quarters = len({i * QUARTERS // k for i in range(k)})
    scouted = B * (1 + (quarters if quarters > 1 else 0))
    surveyed = settings.rounds * (2 + k) * B
    judged = B * (1 + settings.exact_swaps + config.stable)
    simple = 2 * B * (1 + (settings.bootstrap > 0))
    if config.K == AUTO:
        simple += len(simple_averages(k)) * B
    rows = k + settings.rounds * k + (settings.rounds - 1) * K + K * (1 + config.stable)
    rows += K * (config.K == AUTO)  # lawa, whose K was not known in time
    rows += (K if settings.exact_swaps else 0) + 2 * settings.exact_swaps
    floats, integers, statistics = _sizes(bench, batches.recomputes(K))
    room = find_room(bench)
    probe = _probe(bench)
    numbers = probe.size.numbers * batches.selection_rows // probe.size.rows
    extra = 2 + (len(simple_averages(k)) if config.K == AUTO else 0)
    fits = least(k, numbers, extra) <= room.left and numbers <= settings.outputs
    cache = usual(k, min(numbers, settings.outputs), room.left, extra)
    if not fits:  # counted, and found too large: a pass more for each round, on the rows that fit
        surveyed += (settings.rounds + 4) * B
        rows += 2 * K
    return Forecast(
        **heading(config, bench.warnings, task=bench.task.source, device=bench.model.device),
        k=k,
        K="auto" if config.K == AUTO else config.K,
        parameters=bench.model.layout.parameters,
        placement=room.placement(cache),
        bytes_read=bench.reads.bytes
        + (rows + 2 * K) * floats
        - K * statistics
        + K * _factors(bench)
        + integers * (2 + len(parse(REFERENCES)) + 2)
        + _fallback_bytes(bench),
        forward_passes=scouted
        + surveyed
        + judged
        + simple
        + batches.evaluations(K)
        + batches.fallback(),
        backward_passes=0,
        at_most=config.K == AUTO or settings.exact_swaps > 0 or config.fallback or not fits,
        seconds=_linear_seconds(
            bench, probe, rows, scouted + surveyed + judged + simple, batches, K
        ),
    )


def _probe(bench: Bench) -> Surrogate:
    """A cache of one batch and two copies of the model's own weights, to be measured."""
    flat = bench.model.flat.clone()
    batch = next(cycle(bench.task.selection_data, bench.model.device))
    try:
        return build(
            bench.objective, [batch], flat, 2, lambda: ((i, flat) for i in range(2)), 1.0, 2**40
        )
    except ValueError as error:
        raise TaskError(f"the linear solver: {error}") from error


def _linear_seconds(
    bench: Bench, probe: Surrogate, rows: int, passes: int, batches: _Batches, K: int
) -> float:
    """From one row read, one batch forward, and one loss in output space."""
    config, settings, k = bench.config, bench.config.linear, len(bench.checkpoints)
    row = torch.empty(bench.model.layout.size)
    newest, layout = bench.checkpoints[-1], bench.model.layout
    reading = _time(lambda: fill_row(row, bench.floats(newest), layout))
    batch = next(cycle(bench.task.selection_data, bench.model.device))
    forward = _time(lambda: bench.objective.mean_loss([batch]))
    even = torch.full((2,), 1 / 2, dtype=torch.float64)
    in_outputs = _time(lambda: probe.loss_and_gradient(even))
    wide = torch.empty(min(k, ROWS), probe.size.numbers)
    mixing = _time(lambda: wide.sum(0)) * k / len(wide)
    solved = batches.selection * (in_outputs + 2 * mixing)
    evaluations = settings.rounds * 2 * TYPICAL + 4 * QUICK * settings.bootstrap
    if config.K == AUTO:
        evaluations += settings.folds * len(grid(k)) * 2 * TYPICAL
    return rows * reading + (passes + batches.evaluations(K)) * forward + evaluations * solved


def _sizes(bench: Bench, recomputed: bool) -> tuple[int, int, int]:
    """Bytes of a checkpoint's floats, of its integers, and of what BatchNorm recomputes."""
    newest = bench.checkpoints[-1]
    infos = {name: newest.tensors[source] for name, source in bench.names.items()}
    floats = sum(_size(info) for info in infos.values() if info.is_float)
    integers = sum(_size(info) for info in infos.values() if not info.is_float)
    statistics = 0
    if recomputed:  # recomputed tensors are not read again to be written
        layers = batchnorm_layers(bench.model.module).values()
        kept = {bench.model.name_of(b) for x in layers for b in (x.running_mean, x.running_var)}
        statistics = sum(_size(i) for n, i in infos.items() if bench.model.canonical(n) in kept)
    return floats, integers, statistics


def _bytes(bench: Bench, tier: str, recomputed: bool) -> int:
    """Of tensor data: into W, for the references, and the chosen ones, evaluated and written."""
    config = bench.config
    floats, integers, statistics = _sizes(bench, recomputed)
    k, K = len(bench.checkpoints), config.K
    references = len(parse(REFERENCES))
    passes = {
        "memory": k,
        "host": k,
        "bf16": 2 * k + (1 + k + K),  # the mean, the differences; references from the files
        "files": k + (1 + k + K) + 2 * k * config.gumbel.iterations,
    }[tier]
    total = (passes + 2 * K) * floats - K * statistics + K * _factors(bench)
    return total + integers * (1 + references + 2)


def _fallback_bytes(bench: Bench) -> int:
    """A simple average of all, at most, evaluated and written besides."""
    if not bench.config.fallback:
        return 0
    k = len(bench.checkpoints)
    floats, integers, _ = _sizes(bench, recomputed=False)
    return 2 * (k * floats + integers) + k * abs(_factors(bench))


def _factors(bench: Bench) -> int:
    """Of adapters, bytes read besides: factors are measured; merged ones not averaged again."""
    newest = bench.checkpoints[-1]
    if newest.kind != "adapter":
        return 0
    factors = sum(_size(newest.tensors[name]) for pair in pairs(newest.tensors) for name in pair)
    return -factors if bench.config.lora == "merged" else factors


def _size(info: TensorInfo) -> int:
    return int(torch.Size(info.shape).numel()) * DTYPES[info.dtype].itemsize


def _seconds(bench: Bench, tier: str, batches: _Batches) -> float:
    """From one of each: a row read, a block mixed and pulled back, a batch forward and back."""
    k, M = len(bench.checkpoints), bench.config.gumbel.samples
    layout, device = bench.model.layout, bench.model.device
    few = min(k, ROWS if tier == "memory" else 1)
    block = Trajectory(few, layout, device)
    block.k = few
    block.W.zero_()
    row, newest = block.W[0], bench.checkpoints[-1]
    reading = _time(lambda: fill_row(row, bench.floats(newest), layout))
    a, G = torch.zeros(M, few), torch.zeros(M, layout.parameters)
    products = _time(lambda: (block.mix(a), block.pull_back(G))) * k / few
    batch = next(cycle(bench.task.selection_data, device))
    forth_and_back = _time(lambda: bench.objective.loss_and_gradient(row, [batch]))
    step = M * bench.config.gumbel.batches * forth_and_back + products
    if tier == "files":
        step += 2 * k * reading
    evaluations = batches.evaluations(bench.config.K) * forth_and_back / 3
    return bench.config.gumbel.iterations * step + k * reading + evaluations


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
