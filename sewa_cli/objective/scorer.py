"""Measure the weights in the model on everything the task has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sewa_cli.dtypes import Array, as_array
from sewa_cli.objective.memo import Tensors
from sewa_cli.objective.objective import Data, Objective
from sewa_cli.objective.units import UnitLosses, number
from sewa_cli.report.select import BatchNorm
from sewa_cli.report.shared import Scores
from sewa_cli.rng import seeded
from sewa_cli.text import finite

Mode = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Scored:
    """Everything that was measured of one set of weights."""

    scores: Scores
    selection_rows: int
    heldout: UnitLosses | None  # loss by loss, for intervals
    batchnorm: BatchNorm | None = None
    statistics: Mapping[str, Array] = field(default_factory=dict)  # of BatchNorm, recomputed

    @property
    def heldout_rows(self) -> int | None:
        return None if self.heldout is None else int(self.heldout.counts.sum())

    @property
    def heldout_groups(self) -> int | None:
        return None if self.heldout is None else self.heldout.group_count


@dataclass
class Scorer:
    """One model, one set of data, the same treatment for every average.

    `dtypes`: output name → dtype, for every tensor of a file of the weights.
    """

    objective: Objective
    heldout: Data | None = None
    training: Data | None = None  # for BatchNorm; without it, the selection data
    metrics: Callable[[nn.Module], Mapping[str, float]] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    mode: Mode = "off"

    @property
    def recomputes(self) -> bool:
        return bool(self.objective.model.batchnorm) and self.mode != "off"

    @property
    def recomputed_on(self) -> Literal["training_data", "selection_data"] | None:
        if not self.recomputes:
            return None
        return "selection_data" if self.training is None else "training_data"

    def recomputes_for(self, sources: int) -> bool:
        """Return whether statistics are recomputed: a single checkpoint has its own."""
        return self.recomputes and sources > 1

    def load(self, flat: Tensor) -> None:
        """Load weights [P] into the model, rounded as a file of them would be."""
        self.objective.model.set(flat)
        self._round(self.dtypes)

    def score(self, known: tuple[float, int] | None = None) -> Scored:
        """Score what is in the model, as it is; `known`: its selection loss and rows."""
        if not self.objective.has_loss:
            return Scored(Scores(selection_loss=None, metrics=self.measure(None)), 0, None)
        loss, rows = known or self.objective.mean_loss(self.objective.selection)
        heldout = None if self.heldout is None else self.objective.unit_losses(self.heldout)
        scores = Scores(
            selection_loss=finite(loss),
            heldout_loss=None if heldout is None else finite(heldout.mean),
            metrics=self.measure(heldout),
        )
        return Scored(scores, rows, heldout)

    def score_average(self, sources: int) -> Scored:
        """Score an average in the model, with BatchNorm statistics recomputed for it.

        `sources`: how many checkpoints it is made of. The scores before are kept too.
        """
        layers = self.objective.model.batchnorm
        if not layers:
            return self.score()
        before = self.score()
        about = BatchNorm(layers=len(layers), mode=self.mode, before=before.scores)
        if not self.recomputes_for(sources):
            return replace(before, batchnorm=about)
        rows, statistics = self.recompute()
        after = self.score()
        found = {"data": self.recomputed_on, "rows": rows, "after": after.scores}
        about = about.model_copy(update=found)
        return replace(after, batchnorm=about, statistics=statistics)

    def recompute(self) -> tuple[int, dict[str, Array]]:
        """Recompute BatchNorm statistics; return the rows they were taken over, and them."""
        data = self.objective.selection if self.training is None else self.training
        model = self.objective.model
        buffers = [b for x in model.batchnorm.values() for b in (x.running_mean, x.running_var)]
        recomputed = {model.name_of(buffer) for buffer in buffers}
        names = [name for name in self.dtypes if model.canonical(name) in recomputed]

        def work() -> Tensors:
            rows = self.objective.recompute_batchnorm(data)
            self._round(names)
            found = {name: model.value(name).to(self.dtypes[name]) for name in names}
            return {**found, "": number(rows)}

        what = f"batchnorm {[str(self.dtypes[name]) for name in names]}"
        found = dict(self.objective.recall_on(data, what, work))
        rows = int(found.pop(""))
        model.load(found.items())
        return rows, {name: as_array(value.cpu()) for name, value in found.items()}

    def measure(self, heldout: UnitLosses | None) -> dict[str, float | None] | None:
        """The task's metrics: those of the held-out rows' own pass, if it has them, else apart."""
        if heldout is not None and heldout.metrics is not None:
            return {name: finite(value) for name, value in heldout.metrics.items()}
        if self.metrics is None:
            return None
        metrics, model, events = self.metrics, self.objective.model, self.objective.events

        def work() -> Tensors:
            with seeded(self.objective.seed), torch.no_grad(), events.stage("metrics"):
                found = model.ranks.same(metrics(model.module))
            model.module.eval()  # in case metrics() left it training
            model.check_untouched("metrics()")
            return {name: number(value) for name, value in found.items()}

        key = ("metrics", *model.weights)
        measured = self.objective.recall(key, work)
        return {name: finite(float(value)) for name, value in measured.items()}

    def _round(self, names: Iterable[str]) -> None:
        model = self.objective.model
        floats = [name for name in names if model.canonical(name) in model.layout.slices]
        narrow = [name for name in floats if self.dtypes[name] != torch.float32]
        model.load((name, model.value(name).to(self.dtypes[name])) for name in narrow)
