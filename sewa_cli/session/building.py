"""The user's module made ready: the model on its device, its loss, its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sewa_cli import checkpoints as library
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.objective.batchnorm import batchnorm_layers
from sewa_cli.objective.classes import PIECE, Classes
from sewa_cli.objective.model import FlatModel, find_device
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.shares import whole_batches
from sewa_cli.objective.tree import rows
from sewa_cli.objective.units import keep_aside
from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.report.select import Guard
from sewa_cli.session.cache import open_memo
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
        if ranks.several and data is not None and data.shared_out:
            wholes[name] = Batches(partial(whole_batches, data, ranks), name)
    return replace(task, **wholes)


def guarded(task: Task, share: float, seed: int) -> tuple[Task, Guard]:
    """Return the task with a share of its selection rows as held-out data."""
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
        raise ConfigError("cache: nothing is kept of several ranks; leave out --cache")
    return Objective(
        model,
        task.predict,
        task.loss,
        task.backward,
        task.selection_data,
        batch_statistics=config.bn != "off" and bool(batchnorm_layers(model.module)),
        classes=_classes(config, task, ranks, events),
        observe=task.observe,
        summarize=task.summarize,
        label_groups=task.groups,
        seed=config.seed,
        memo=open_memo(config, task, checkpoints, device, events),
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


def _classes(config: Config, task: Task, ranks: Ranks, events: Events) -> Classes | None:
    """Return the task's statement about its cross-entropies, if there is one."""
    if task.targets is None:
        return None
    room = PIECE if config.memory is None else min(PIECE, config.memory // OF_MEMORY)
    functions = task.predict, task.loss, task.targets, task.features, task.head
    if ranks.several:  # a head outside of the model's forward pass has no weights there
        functions = *functions[:3], None, None
    return Classes(*functions, room, task.proven, events.warn)
