"""A task's loss as a function of a model's weights, without a command around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sewa_cli.objective.classes import PIECE, Classes
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.task import Task


def objective_of(
    task: Task,
    model: nn.Module,
    memory_left: int = PIECE,
    warn: Callable[[str], None] = lambda _: None,
    **others: Any,
) -> Objective:
    """Return the objective of a task; `memory_left` is the bytes of logits at once."""
    classes = None
    if task.targets is not None:
        functions = task.predict, task.loss, task.targets, task.features, task.head
        classes = Classes(*functions, memory_left, task.proven, warn)
    return Objective(
        FlatModel(model, torch.device("cpu")),
        task.predict,
        task.loss,
        task.backward,
        task.selection_data,
        classes=classes,
        observe=task.observe,
        summarize=task.summarize,
        **others,
    )


def metrics_of(task: Task, model: nn.Module, data: Iterable[Any]) -> Mapping[str, float]:
    """Return the metrics of a ready-made task."""
    return objective_of(task, model).unit_losses(data).metrics
