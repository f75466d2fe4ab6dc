"""Weighs weights: loads an average into the model and evaluates it on everything the task has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Literal

import torch

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.evaluate import batchnorm_layers, recompute_batchnorm
from sewa_cli.report import BatchNorm, Scores
from sewa_cli.run.bench import Bench
from sewa_cli.run.recipe import Averaged
from sewa_cli.task import Batches
from sewa_cli.trajectory import Trajectory


class Scales:
    """One model, one set of data, the same treatment for every average."""

    def __init__(self, bench: Bench, trajectory: Trajectory, used: list[Checkpoint]) -> None:
        self._bench = bench
        self._trajectory = trajectory
        self._as_written = Averaged([used[-1]], [1.0], bench.names, bench.config.output_dtype)
        self.selection_rows = 0
        self.heldout_rows: int | None = None
        self._layers = batchnorm_layers(bench.model.module)
        if bench.config.bn == "on" and not self._layers:
            raise ConfigError(
                "bn: on, but the model has no BatchNorm layer with running statistics"
            )
        bench.load_integers(used[-1])

    def weigh(self, coefficients: Sequence[float]) -> Scores:
        """An average that is not written, from W, rounded as a file of it would be."""
        mixed = self._trajectory.mix(torch.tensor([coefficients], dtype=torch.float64))
        model = self._bench.model
        model.set(mixed[0])
        self._round(self._bench.names)
        if self._recomputes(sum(c > 0 for c in coefficients)):
            self._recompute()
        return self._scores()

    def weigh_file(self, averaged: Averaged) -> tuple[Scores, BatchNorm | None]:
        """The very tensors that will be written; BatchNorm statistics are recomputed into it."""
        self._bench.model.load(averaged.tensors())
        if not self._layers:
            return self._scores(), None
        mode = self._bench.config.bn
        before = self._scores()
        if not self._recomputes(len(averaged.sources)):
            return before, BatchNorm(layers=len(self._layers), mode=mode, before=before)
        data, rows = self._recompute()
        averaged.replaced = {
            name: self._bench.model.value(name).to(averaged.dtype_of(name)).cpu()
            for name in self._statistics()
        }
        after = self._scores()
        return after, BatchNorm(
            layers=len(self._layers), mode=mode, data=data, rows=rows, before=before, after=after
        )

    def _recomputes(self, sources: int) -> bool:
        """A single checkpoint has its own statistics already."""
        mode = self._bench.config.bn
        return bool(self._layers) and (mode == "on" or (mode == "auto" and sources > 1))

    def _recompute(self) -> tuple[Literal["training_data", "selection_data"], int]:
        task = self._bench.task
        data = task.training_data or task.selection_data
        try:
            rows = recompute_batchnorm(self._bench.objective, data)
        except ValueError as error:
            raise TaskError(f"{data.name}(): {error}") from error
        self._round(self._statistics())
        return "training_data" if task.training_data else "selection_data", rows

    def _statistics(self) -> list[str]:
        """Output names of the recomputed tensors."""
        model = self._bench.model
        buffers = [b for x in self._layers.values() for b in (x.running_mean, x.running_var)]
        recomputed = {model.name_of(buffer) for buffer in buffers}
        return [name for name in self._bench.names if model.canonical(name) in recomputed]

    def _round(self, names: Iterable[str]) -> None:
        """To the precision that a file of these weights would have."""
        model, as_written = self._bench.model, self._as_written
        floats = [name for name in names if model.canonical(name) in model.layout.slices]
        narrow = [name for name in floats if as_written.dtype_of(name) != torch.float32]
        model.load(
            (name, self._bench.model.value(name).to(as_written.dtype_of(name))) for name in narrow
        )

    def _scores(self) -> Scores:
        bench, task = self._bench, self._bench.task
        bench.listener.note("evaluating")
        selection, self.selection_rows = self._loss(task.selection_data)
        heldout = None
        if task.heldout_data is not None:
            heldout, self.heldout_rows = self._loss(task.heldout_data)
        metrics = None
        if task.metrics is not None:
            with torch.no_grad():
                metrics = {n: _finite(v) for n, v in task.metrics(bench.model.module).items()}
            bench.model.module.eval()  # in case metrics() left it training
            try:
                bench.model.check_untouched()
            except ValueError as error:
                raise TaskError(f"metrics(): {error}") from error
        return Scores(selection_loss=selection, heldout_loss=heldout, metrics=metrics)

    def _loss(self, data: Batches) -> tuple[float | None, int]:
        try:
            loss, rows = self._bench.objective.mean_loss(data)
        except ValueError as error:
            raise TaskError(f"{data.name}(): {error}") from error
        return _finite(loss), rows


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
