"""Scores of averages: the only place that measures them, each once.

    baseline_losses   selection losses of many averages, as a solver sees them while it learns
    selection         the selection loss of one, as a file of it has it before BatchNorm
    evaluate          everything that the task measures, as of a file
    written           the same of the tensors that are written

Every value is kept: who asks for it again does not pay with time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from sewa_cli.dtypes import Array, as_array
from sewa_cli.methods import Coefficients
from sewa_cli.methods.fixed import Name
from sewa_cli.objective.memo import Tensors
from sewa_cli.objective.objective import Data, Objective
from sewa_cli.objective.tree import rows
from sewa_cli.objective.units import UnitLosses, number, take_evenly
from sewa_cli.output.average import Average, taking_part
from sewa_cli.report.select import BatchNorm
from sewa_cli.report.shared import Measured
from sewa_cli.rng import seeded
from sewa_cli.solvers import Sizes
from sewa_cli.text import finite
from sewa_cli.trajectory import Trajectory

if TYPE_CHECKING:
    from sewa_cli.opening import Session

T = TypeVar("T")
Key = tuple[object, ...]
Mode = Literal["auto", "on", "off"]
BASELINE_BATCHES = 32  # of about 15 baselines: a mask learns from 200, forward and backward


@dataclass(frozen=True)
class Scored:
    """Everything that was measured of one set of weights."""

    scores: Measured
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

    dtypes  output name → dtype, for every tensor of a file of the weights
    mode    of BatchNorm; off: the model has none, or its statistics are left as they are
    """

    objective: Objective
    heldout: Data | None = None
    training: Data | None = None  # for BatchNorm; without it, the selection data
    metrics: Callable[[nn.Module], Mapping[str, float]] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    mode: Mode = "off"

    @property
    def recomputed_on(self) -> Literal["training_data", "selection_data"] | None:
        if self.mode == "off":
            return None
        return "selection_data" if self.training is None else "training_data"

    def recomputes_for(self, sources: int) -> bool:
        """Return whether statistics are recomputed: a single checkpoint has its own."""
        return self.mode != "off" and sources > 1

    def load(self, flat: Tensor) -> None:
        """Load weights [P] into the model, rounded as a file of them would be."""
        self.objective.model.set(flat)
        if any(dtype != torch.float32 for dtype in self.dtypes.values()):
            self._round(self.dtypes)

    def score(self, known: tuple[float, int] | None = None) -> Scored:
        """Score what is in the model, as it is; `known`: its selection loss and rows."""
        if not self.objective.has_loss:
            return Scored(Measured(selection_loss=None, metrics=self.measure(None)), 0, None)
        loss, rows = known or self.objective.mean_loss(self.objective.selection)
        heldout = None if self.heldout is None else self.objective.unit_losses(self.heldout)
        scores = Measured(
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
        """The task's metrics: those of the held-out rows' own pass, and those that are apart."""
        passed = None if heldout is None else heldout.metrics
        by_loss = {name: finite(value) for name, value in (passed or {}).items()}
        if self.metrics is None:
            return None if passed is None else by_loss
        metrics, model, events = self.metrics, self.objective.model, self.objective.events

        def work() -> Tensors:
            with seeded(self.objective.seed), torch.no_grad(), events.stage("metrics"):
                found = model.ranks.same(metrics(model.module))
            model.module.eval()  # in case metrics() left it training
            model.check_untouched("metrics()")
            return {name: number(value) for name, value in found.items()}

        key = ("metrics", *model.weights)
        measured = self.objective.recall(key, work)
        return {name: finite(float(value)) for name, value in measured.items()} | by_loss

    def _round(self, names: Iterable[str]) -> None:
        model = self.objective.model
        floats = [name for name in names if model.canonical(name) in model.layout.slices]
        narrow = [name for name in floats if self.dtypes[name] != torch.float32]
        model.load((name, model.value(name).to(self.dtypes[name])) for name in narrow)


# ---- averages of one W --------------------------------------------------------------------------


def same(coefficients: Sequence[float]) -> Key:
    """Return a key under which averages that differ in the last bits only are one."""
    return tuple(round(c, 12) for c in coefficients)


class BaselineLosses(NamedTuple):
    """Selection losses by name, and the examples that they are means over; None: all."""

    losses: dict[Name, float]
    rows: int | None = None


class AverageScores:
    """Averages of one W: loaded into the model as a file has them, and measured there."""

    def __init__(self, session: Session, trajectory: Trajectory, memory_left: int) -> None:
        """`memory_left`: bytes that may be allocated next to W."""
        self._session, self._trajectory, self._room = session, trajectory, memory_left
        self._done: dict[Key, Any] = {}
        self._loaded: tuple[tuple[float, ...], int] | None = None

    def on(self, session: Session) -> Self:
        """Return the scores of the same averages, on the session's own examples."""
        found = copy(self)
        found._session = session
        return found

    def once(self, kind: str, key: Sequence[object], work: Callable[[], T]) -> T:
        """Return what `work` gives, or gave before under this key."""
        full = (kind, *key)
        if full not in self._done:
            self._done[full] = work()
        found: T = self._done[full]
        return found

    def baseline_losses(self, averages: Mapping[Name, Coefficients]) -> BaselineLosses:
        """Selection losses while learning, as many averages at a time as there is room for.

        Of many batches they are on a few from all over: all would take longer than learning.
        """
        names, found, objective = list(averages), dict[Name, float](), self._session.objective
        with seeded(objective.seed):
            sample = take_evenly(objective.selection, BASELINE_BATCHES)
        if sample is not None:
            objective = replace(objective, selection=sample)
        events, trajectory = self._session.events, self._trajectory
        at_once = Sizes(0, 0, 0, self._room, 4 * trajectory.layout.size).at_once
        for start in range(0, len(names), at_once):
            some = names[start : start + at_once]
            weights = torch.tensor([averages[name] for name in some], dtype=torch.float64)
            mixed = trajectory.mix(weights)
            for name, flat in zip(some, mixed, strict=True):
                events.progress("baselines", len(found), len(names))
                found[name] = self._baseline_loss(objective, averages[name], flat)
            del mixed, flat  # before the next are made
            events.progress("baselines", len(found), len(names))
        self._loaded = None
        return BaselineLosses(found, None if sample is None else sum(map(rows, sample)))

    def _baseline_loss(
        self, objective: Objective, coefficients: Coefficients, flat: torch.Tensor
    ) -> float:
        exact = self._trajectory.exact
        if not (exact and has_learning_losses(self._session)):
            return objective.learning_losses(flat).mean
        objective.model.set(flat)
        known = objective.mean_loss(objective.selection)
        if objective is self._session.objective:
            self.once("selection", self._key(coefficients), lambda: known)
        return known[0]

    def selection(self, coefficients: Sequence[float]) -> tuple[float, int]:
        """Return the selection loss, with BatchNorm statistics averaged; and its rows."""

        def work() -> tuple[float, int]:
            self.load(coefficients)
            objective = self._session.objective
            return objective.mean_loss(objective.selection)

        return self.once("selection", self._key(coefficients), work)

    def evaluate(self, coefficients: Sequence[float]) -> Scored:
        """Measure all that the task has, BatchNorm as in a file."""
        anew = self._session.scorer.recomputes_for(sum(c != 0 for c in coefficients))
        # without BatchNorm the loss that methods see is the loss that is reported
        known = None if anew else self.selection(coefficients)

        def work() -> Scored:
            self.load(coefficients)
            statistics = self._session.scorer.recompute()[1] if anew else {}
            return replace(self._session.scorer.score(known), statistics=statistics)

        return self.once("evaluate", self._key(coefficients), work)

    def written(self, average: Average) -> tuple[Average, Scored]:
        """Score the tensors that will be written, with BatchNorm statistics recomputed."""
        model, events = self._session.model, self._session.events
        model.load(events.over("averaging", average.parts(model.part), len(average.names)))
        scored = self._session.scorer.score_average(len(average.sources))
        if scored.statistics:
            average = average.with_statistics(scored.statistics)
        return average, scored

    def load(self, coefficients: Sequence[float]) -> None:
        """Load an average, rounded as a file of it: from W, or from the files if W is inexact."""
        session, model = self._session, self._session.model
        trajectory = self._trajectory
        if (tuple(coefficients), model.version) == self._loaded:
            return
        used = [session.checkpoints[i] for i in trajectory.used]
        if trajectory.exact:
            self._session.scorer.load(trajectory.mix_few(coefficients))
            newest = max(i for i, c in enumerate(coefficients) if c != 0)
            session.load_integers(used[newest])  # as in a file: the newest's
        else:
            average = Average(
                *taking_part(used, coefficients), session.names, session.config.output_dtype
            )
            tensors = average.parts(model.part)
            model.load(session.events.over("averaging", tensors, len(session.names)))
        self._loaded = (tuple(coefficients), model.version)

    def load_as_file(self, coefficients: Sequence[float]) -> Mapping[str, Any]:
        """Load an average with the BatchNorm statistics of its file, and return these."""
        self.load(coefficients)
        if not self._session.scorer.recomputes_for(sum(c != 0 for c in coefficients)):
            return {}
        return self._session.scorer.recompute()[1]

    def _key(self, coefficients: Sequence[float]) -> Key:
        """Return all that a loss depends on: the average, and the examples it is a mean over."""
        return getattr(self._session.objective.selection, "name", None), *same(coefficients)


def has_learning_losses(session: Session) -> bool:
    """Return whether a file of float32 weights has the losses of learning: none is rounded."""
    floats = [dtype for dtype in session.scorer.dtypes.values() if dtype.is_floating_point]
    return all(dtype == torch.float32 for dtype in floats) and (
        not session.objective.batch_statistics
    )
