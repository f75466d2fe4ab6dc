"""`sewa select --dry-run`: what the run will read, hold and compute, before it does.

Counted from the same sizes and settings that the run goes by; seconds are extrapolated from one
row read, one block mixed and one batch put through the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from sewa_cli.checkpoints import TensorInfo, pairs
from sewa_cli.config import Config
from sewa_cli.evaluate import batchnorm_layers, cycle, rows
from sewa_cli.methods import parse
from sewa_cli.report import Placement
from sewa_cli.run.bench import Bench, Listener, seeded, set_up
from sewa_cli.run.placing import make_plan
from sewa_cli.run.recipe import DTYPES
from sewa_cli.run.select import REFERENCES
from sewa_cli.task import Task
from sewa_cli.trajectory import ROWS, Trajectory, fill_row


class Forecast(BaseModel):
    """True of a run in which no checkpoint is left out for NaN or Inf."""

    model_config = ConfigDict(frozen=True)

    k: int
    K: int
    parameters: int
    device: str
    placement: Placement
    bytes_read: int
    forward_passes: int
    backward_passes: int
    seconds: float


def run_forecast(config: Config, task: Task, listener: Listener | None = None) -> Forecast:
    with seeded(config.seed):
        bench = set_up(config, task, listener or Listener())
        plan = make_plan(bench)
        batches = _Batches(bench)
        iterations = config.gumbel.iterations * config.gumbel.samples * config.gumbel.batches
        return Forecast(
            k=len(bench.checkpoints),
            K=config.K,
            parameters=bench.model.layout.parameters,
            device=str(bench.model.device),
            placement=plan.placement(plan.tier),
            bytes_read=bench.reads.bytes + _bytes(bench, plan.tier, batches.recomputes(config.K)),
            forward_passes=iterations + batches.evaluations(config.K),
            backward_passes=iterations,
            seconds=_seconds(bench, plan.tier, batches),
        )


class _Batches:
    """How many batches each evaluation goes through."""

    def __init__(self, bench: Bench) -> None:
        task = bench.task
        self._mode = bench.config.bn if batchnorm_layers(bench.model.module) else "off"
        self._has_batchnorm = bool(batchnorm_layers(bench.model.module))
        self.scored = _count(task.selection_data, empty=False)
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


def _count(data: Iterable[Any], empty: bool) -> int:
    return sum(empty or rows(batch) > 0 for batch in data)


def _bytes(bench: Bench, tier: str, recomputed: bool) -> int:
    """Of tensor data: into W, for the references, and the chosen ones, evaluated and written."""
    newest, config = bench.checkpoints[-1], bench.config
    infos = {name: newest.tensors[source] for name, source in bench.names.items()}
    floats = sum(_size(info) for info in infos.values() if info.is_float)
    integers = sum(_size(info) for info in infos.values() if not info.is_float)
    k, K = len(bench.checkpoints), config.K
    references = len(parse(REFERENCES))
    passes = {
        "memory": k,
        "host": k,
        "bf16": 2 * k + (1 + k + K),  # the mean, the differences; references from the files
        # of an average of a few, only those are read; of one of many, all
        "files": k + (1 + k + (K if k // 2 >= K else k)) + 2 * k * config.gumbel.iterations,
    }[tier]
    statistics = 0
    if recomputed:  # recomputed tensors are not read again to be written
        layers = batchnorm_layers(bench.model.module).values()
        kept = {bench.model.name_of(b) for x in layers for b in (x.running_mean, x.running_var)}
        statistics = sum(_size(i) for n, i in infos.items() if bench.model.canonical(n) in kept)
    total = (passes + 2 * K) * floats - K * statistics
    if newest.kind == "adapter":  # factors are measured; merged ones are then not averaged again
        factors = sum(
            _size(newest.tensors[name]) for pair in pairs(newest.tensors) for name in pair
        )
        total += K * factors * (-1 if config.lora == "merged" else 1)
    return total + integers * (1 + references + 2)


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
    """The second time counts; the first pays for pages and caches."""
    for _ in range(2):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return time.perf_counter() - start
