"""Weighs weights: loads an average into the model and evaluates it on everything the task has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.dtypes import Array, as_array, torch_dtype
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.objective.objective import (
    Objective,
    UnitLosses,
    batchnorm_layers,
    recompute_batchnorm,
)
from sewa_cli.output.average import Average
from sewa_cli.report.select import BatchNorm
from sewa_cli.report.shared import Scores
from sewa_cli.rng import seeded
from sewa_cli.session.session import Bench
from sewa_cli.task import Batches, Task
from sewa_cli.text import finite
from sewa_cli.trajectory import Trajectory


class Weigher:
    """Losses and metrics of whatever weights are in the model."""

    def __init__(self, objective: Objective, task: Task, seed: int = 0) -> None:
        self._objective = objective
        self._task = task
        self._seed = seed
        self.selection_rows = 0
        self.heldout_rows: int | None = None
        self.heldout: UnitLosses | None = None  # of what was scored last

    def scores(self) -> Scores:
        """Everything the task can say of what is in the model."""
        selection = self.selection_loss()
        with seeded(
            self._seed
        ):  # a loader that shuffles does so alike each time: losses are paired
            self.heldout = self.heldout_units()
        return Scores(
            selection_loss=selection,
            heldout_loss=None if self.heldout is None else finite(self.heldout.mean),
            metrics=self.metrics(),
        )

    def selection_loss(self) -> float | None:
        """Of what is in the model; None where it is not finite."""
        data = self._task.selection_data
        with _told_of(data):
            loss, self.selection_rows = self._objective.mean_loss(data)
        return finite(loss)

    def heldout_units(self) -> UnitLosses | None:
        """Held-out losses row by row, for intervals."""
        data = self._task.heldout_data
        if data is None:
            return None
        with _told_of(data):
            units = self._objective.unit_losses(data)
        self.heldout_rows = int(units.counts.sum())
        return units

    def metrics(self) -> dict[str, float | None] | None:
        task, model = self._task, self._objective.model
        if task.metrics is None:
            return None
        with torch.no_grad():
            found = {name: finite(value) for name, value in task.metrics(model.module).items()}
        model.module.eval()  # in case metrics() left it training
        try:
            model.check_untouched()
        except ValueError as error:
            raise TaskError(f"metrics(): {error}") from error
        return found


class Scales(Weigher):
    """One model, one set of data, the same treatment for every average."""

    def __init__(self, bench: Bench, trajectory: Trajectory, used: list[Checkpoint]) -> None:
        super().__init__(bench.objective, bench.task, bench.config.seed)
        self._bench = bench
        self._trajectory = trajectory
        self._used = used
        self._as_written = Average((used[-1],), (1.0,), bench.names, bench.config.output_dtype)
        self.recomputed_on: Literal["training_data", "selection_data"] | None = None
        self._loaded: tuple[tuple[float, ...], int] | None = None
        self._has_integers = any(
            not used[-1].tensors[source].is_float for source in bench.names.values()
        )
        self._layers = batchnorm_layers(bench.model.module)
        if bench.config.bn == "on" and not self._layers:
            raise ConfigError(
                "bn: on, but the model has no BatchNorm layer with running statistics"
            )
        bench.load_integers(used[-1])

    def weigh(self, coefficients: Sequence[float]) -> Scores:
        """An average that is not written, from W; BatchNorm as for a file of it."""
        self.load(coefficients)
        if self._recomputes(sum(c != 0 for c in coefficients)):
            self.recompute()
        return self.scores()

    def weigh_file(self, averaged: Average) -> tuple[Scores, BatchNorm | None, dict[str, Array]]:
        """The very tensors that will be written; and its BatchNorm statistics, recomputed."""
        self._bench.model.load(averaged.tensors())
        if not self._layers:
            return self.scores(), None, {}
        layers, mode = len(self._layers), self._bench.config.bn
        before = self.scores()
        if not self._recomputes(len(averaged.sources)):
            return before, BatchNorm(layers=layers, mode=mode, before=before), {}
        rows = self.recompute()
        statistics = self.recomputed()
        after = self.scores()
        found = BatchNorm(
            layers=layers,
            mode=mode,
            data=self.recomputed_on,
            rows=rows,
            before=before,
            after=after,
        )
        return after, found, statistics

    def load(self, coefficients: Sequence[float]) -> None:
        """An average into the model, rounded as a file of it would be.

        From W, or, where W is not exact, from the files.
        """
        now = (tuple(coefficients), self._bench.model.version)
        if now == self._loaded:
            return
        chosen = [i for i, c in enumerate(coefficients) if c != 0]
        if not self._trajectory.exact:
            names, dtype = self._bench.names, self._bench.config.output_dtype
            average = Average.of(self._used, coefficients, names, method="", dtype=dtype, lora=None)
            self._bench.model.load(average.tensors())
        else:
            self._bench.model.set(self._trajectory.mix_few(coefficients))
            self._round(self._bench.names)
            if self._has_integers:  # as in a file: those of the newest that takes part
                self._bench.load_integers(self._used[chosen[-1]])
        self._loaded = (tuple(coefficients), self._bench.model.version)

    @property
    def recomputes_all(self) -> bool:
        return bool(self._layers) and self._bench.config.bn != "off"

    def _recomputes(self, sources: int) -> bool:
        """A single checkpoint has its own statistics already."""
        return self.recomputes_all and (self._bench.config.bn == "on" or sources > 1)

    def recompute(self) -> int:
        """BatchNorm statistics of what is in the model; returns the rows they were taken over."""
        task = self._bench.task
        data = task.training_data or task.selection_data
        self.recomputed_on = "training_data" if task.training_data else "selection_data"
        try:
            rows = recompute_batchnorm(self._bench.objective, data)
        except ValueError as error:
            raise TaskError(f"{data.name}(): {error}") from error
        self._loaded = None
        self._round(self._statistics())
        return rows

    def recomputed(self) -> dict[str, Array]:
        """The statistics that are in the model, as a file of it would hold them."""
        model = self._bench.model
        return {
            name: as_array(model.value(name).to(self._dtype_of(name)))
            for name in self._statistics()
        }

    def _statistics(self) -> list[str]:
        """Output names of the recomputed tensors."""
        model = self._bench.model
        buffers = [b for x in self._layers.values() for b in (x.running_mean, x.running_var)]
        recomputed = {model.name_of(buffer) for buffer in buffers}
        return [name for name in self._bench.names if model.canonical(name) in recomputed]

    def _round(self, names: Iterable[str]) -> None:
        """To the precision that a file of these weights would have."""
        model = self._bench.model
        floats = [name for name in names if model.canonical(name) in model.layout.slices]
        narrow = [name for name in floats if self._dtype_of(name) != torch.float32]
        model.load((name, model.value(name).to(self._dtype_of(name))) for name in narrow)

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch_dtype(self._as_written.dtype_of(name))


@contextmanager
def _told_of(data: Batches) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise TaskError(f"{data.name}(): {error}") from error
