"""Open what a command works on: checkpoints, the user's model and data, and how they fit."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sewa_cli import checkpoints as library
from sewa_cli import ranks
from sewa_cli.cache import open_cache
from sewa_cli.candidates import check_names, open_candidates, warn_of_no_steps
from sewa_cli.checkpoints import Checkpoint, Reads, paths_of
from sewa_cli.config import AUTO, Config
from sewa_cli.dtypes import DTYPES, WORDS, torch_dtype
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import check_K
from sewa_cli.objective.classes import PIECE, Classes
from sewa_cli.objective.model import FlatModel, find_device
from sewa_cli.objective.objective import Data, Objective
from sewa_cli.objective.shares import Shares, whole_batches
from sewa_cli.objective.tree import rows
from sewa_cli.objective.units import keep_aside
from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.report.select import Guard
from sewa_cli.report.shared import Cost, Seconds
from sewa_cli.scores import Scorer
from sewa_cli.task import Batches, Task

OF_MEMORY = 8  # a piece of logits, its softmax and that one's gradient take half of it at most


def check_objective(config: Config, task: Task) -> None:
    """Refuse a task that lacks the loss or the score to choose by."""
    metric = config.objective.metric
    if metric is None and not task.has_loss:
        raise TaskError(
            f"{task.source} has no loss(outputs, batch), and this needs one; choose by its metric: "
            "--metric NAME"
        )
    if metric is not None and task.scoring is None:
        raise TaskError(
            f"--metric {metric}: {task.source} has no score() yet; add `def score(model, part): "
            f'return {{"{metric}": ...}}`, or leave out --metric'
        )


def with_whole_batches(task: Task, ranks: Ranks) -> Task:
    """Put together what the task shares out among several ranks itself: all see the same."""
    wholes: dict[str, Any] = {}
    for name in ("selection_data", "heldout_data", "training_data"):
        data = getattr(task, name)
        if data is not None and data.shared_out:
            wholes[name] = Batches(partial(whole_batches, data, ranks), name)
    return replace(task, **wholes)


def guarded(task: Task, share: float, seed: int) -> tuple[Task, Guard]:
    selection, heldout = keep_aside(task.selection_data, share, seed, task.groups)
    with_guard = replace(
        task,
        selection_data=Batches(lambda: selection, "selection_data"),
        heldout_data=Batches(lambda: heldout, "selection_data kept aside"),
    )
    return with_guard, Guard(share=share, rows=sum(map(rows, heldout)))


def build_objective(
    config: Config, task: Task, checkpoints: Sequence[Checkpoint], events: Events, ranks: Ranks
) -> Objective:
    """Return the user's loss as a function of weights. Its results are kept under `--cache`."""
    device = find_device(config.device)
    with events.stage("building the model"):
        model = build_model(task, checkpoints[-1], device, ranks)
    if ranks.several and config.cache is not None:
        raise ConfigError("cache: does not work on several ranks; leave out --cache")
    is_kept = config.cache is not None
    memo = open_cache(config, task, checkpoints, device, events) if is_kept else None
    return Objective(
        model,
        task.predict,
        task.loss,
        task.backward,
        task.selection_data,
        batch_statistics=config.bn != "off" and bool(model.batchnorm),
        classes=None if task.targets is None else _classes(config, task, ranks, events),
        observe=task.observe,
        summarize=task.summarize,
        label_groups=task.groups,
        seed=config.seed,
        shares=Shares(ranks, events.warn) if ranks.several else None,
        memo=memo,
        events=events,
        has_loss=task.has_loss,
    )


def build_model(
    task: Task, newest: Checkpoint, device: torch.device, ranks: Ranks = ALONE
) -> FlatModel:
    """Build the user's model on its device; of one with adapters, only these can change."""
    built = task.build_model()
    is_adapter = newest.kind == "adapter"
    only = library.check_fits(newest, built.state_dict()) if is_adapter else None
    return FlatModel(built, device, only, task.parallelize, ranks)


def _classes(config: Config, task: Task, ranks: Ranks, events: Events) -> Classes:
    assert task.targets is not None
    memory_left = PIECE if config.memory is None else min(PIECE, config.memory // OF_MEMORY)
    functions = task.predict, task.loss, task.targets, task.features, task.head
    if ranks.several:  # a head outside of the model's forward pass has no weights there
        functions = *functions[:3], None, None
    return Classes(*functions, memory_left, task.proven, events.warn)


@dataclass(frozen=True)
class Clock:
    """Seconds by stage."""

    started: float = field(default_factory=time.perf_counter)
    stages: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("read", "learn", "evaluate", "write"), 0.0)
    )

    def seconds(self) -> Seconds:
        return Seconds(total=time.perf_counter() - self.started, **self.stages)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] += time.perf_counter() - start


def peak_memory() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Session:
    """The files, model, names and data that one command has opened."""

    config: Config
    task: Task
    events: Events
    checkpoints: list[Checkpoint]
    names: Mapping[str, str]  # model name → checkpoint name
    model: FlatModel
    objective: Objective
    scorer: Scorer
    reads: Reads
    inputs: list[Path]  # never to be overwritten
    guard: Guard | None = None
    clock: Clock = field(default_factory=Clock)
    found: int = 0  # checkpoints, of which some take part

    @property
    def newest(self) -> Checkpoint:
        return self.checkpoints[-1]

    def on(self, examples: Data) -> Session:
        """Return the same with selection losses taken of these examples alone."""
        objective = replace(self.objective, selection=examples)
        return replace(self, objective=objective, scorer=replace(self.scorer, objective=objective))

    def load_integers(self, checkpoint: Checkpoint) -> None:
        named = [(n, s) for n, s in self.names.items() if not checkpoint.tensors[s].is_float]
        if named:
            self.model.load((name, checkpoint.read(source)) for name, source in named)

    def cost(self) -> Cost:
        """Return the cost of all that was done so far."""
        passes, device, memo = self.objective.passes, self.model.device, self.objective.memo
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Cost(
            seconds=self.clock.seconds(),
            forward_passes=passes.forward,
            backward_passes=passes.backward,
            bytes_read=self.reads.bytes,
            peak_memory_bytes=peak_memory(),
            peak_device_memory_bytes=on_device,
            recalled=None if memo is None else memo.recalled,
        )


def open_session(config: Config, task: Task, events: Events) -> Session:
    """Read headers, build the model and match names; no tensor is read yet."""
    here = ranks.here()
    guard, clock = None, Clock()
    if here.several:
        task = with_whole_batches(task, here)
    if config.guard is not None and config.objective.metric is None:  # else it is of parts
        if task.heldout_data is not None:
            raise ConfigError(f"--guard: {task.source} has heldout_data already; drop one of them")
        task, guard = guarded(task, config.guard, config.seed)
    reads = Reads()
    candidates, found, config = open_candidates(config, events, reads)
    check_names(config, task.source)
    objective = build_objective(config, task, candidates, events, here)
    model = objective.model
    names = library.match_names(candidates[-1], model.aliases, model.shapes, model.layout.slices)
    if model.has_ties:
        library.check_tied(candidates[-1], model.aliases)
    warn_of_no_steps(candidates, events)
    assumed = None if config.objective.metric is None else config.objective.assumption
    for text in ([assumed] if assumed else []) + [*task.warnings]:
        events.warn(text)
    return Session(
        config,
        task,
        events,
        candidates,
        names,
        model,
        objective,
        _make_scorer(config, task, objective, candidates[-1], names),
        reads,
        [*paths_of(found), Path(task.source), *task.files],
        guard,
        clock,
        len(found),
    )


def _make_scorer(
    config: Config, task: Task, objective: Objective, newest: Checkpoint, names: Mapping[str, str]
) -> Scorer:
    dtype, mode = config.output_dtype, config.bn
    if mode == "on" and not objective.model.batchnorm:
        raise ConfigError(
            "bn: on, but the model has no BatchNorm layer with running statistics; leave it out"
        )
    has_data = task.has_loss or task.training_data is not None
    if not objective.model.batchnorm or (mode == "auto" and not has_data):
        mode = "off"  # or there is nothing to take statistics over
    infos = {name: newest.tensors[source] for name, source in names.items()}
    words = {n: WORDS[dtype] if dtype and i.is_float else i.dtype for n, i in infos.items()}
    return Scorer(
        objective,
        task.heldout_data,
        task.training_data,
        task.metrics if config.objective.metric is None else None,
        {name: torch_dtype(DTYPES[word]) for name, word in words.items()},
        mode,
    )


def check_budget(K: int, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse a K that leaves nothing to choose."""
    k = len(checkpoints)
    if k == 1:
        raise CheckpointError(f"{checkpoints[0].path}: is the only checkpoint; name several")
    if K != AUTO:
        check_K(K, k, k - 1)
