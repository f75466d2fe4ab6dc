"""`from sewa_cli import select`: the main job on objects instead of files and YAML."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from sewa_cli.commands.select import Selection, run_select
from sewa_cli.events import Events
from sewa_cli.extensions import load_settings
from sewa_cli.task import make_task

PathLike = str | os.PathLike[str]
Data = Iterable[Any] | Callable[[], Iterable[Any]]


def select(
    checkpoints: PathLike | Sequence[PathLike],
    *,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor] | None = None,
    selection_data: Data | None = None,
    predict: Callable[[nn.Module, Any], Any] | None = None,
    heldout_data: Data | None = None,
    training_data: Data | None = None,
    metrics: Callable[[nn.Module], Mapping[str, float]] | None = None,
    groups: Callable[[Any], Sequence[Hashable] | Tensor] | None = None,
    targets: Callable[[Any], Tensor | tuple[Tensor, Tensor]] | None = None,
    features: Callable[[nn.Module, Any], Tensor] | None = None,
    head: Callable[[nn.Module, Tensor], Tensor] | None = None,
    metric: str | None = None,
    budget: int | str | None = None,
    score: Callable[[nn.Module, Any], float | Mapping[str, float]] | None = None,
    score_parts: Iterable[Any] | None = None,
    heldout_parts: Iterable[Any] | None = None,
    K: int | Literal["auto"] = "auto",
    output: PathLike | None = None,
    force: bool = False,
    events: Events | None = None,
    **settings: Any,
) -> Selection:
    """Choose K of the checkpoints whose average has the lowest loss, or the best metric.

    checkpoints  a run's folder (docs/how-to/layouts.md), or a list of checkpoints
    model        an nn.Module the checkpoints fit; it is copied, yours stays as it is
    loss         loss(outputs, batch): the mean over the batch, differentiable in outputs
    *_data       re-iterable batches, or a function that returns them
    groups       groups(batch): a label for each example, if some depend on each other
    targets      targets(batch): the classes of a cross-entropy (docs/reference/tasks.md)
    metric       choose by this and not by the loss: what score(model, part) gives for each of
                 `score_parts`, within a `budget` of evaluations (docs/how-to/metrics.md)
    output       where to write the averaged file (and its report); None: nothing is written
    settings     any other key of sewa.yaml: last=100, device="cpu", guard=0.2

    The result has what was chosen, the report, and its words: `summary()`, `table()`, `plot()`.
    Raises the `sewa_cli.errors` that the command line turns into exit codes.
    """
    given = {
        "build_model": lambda: copy.deepcopy(model),
        "selection_data": _as_function(selection_data),
        "loss": loss,
        "predict": predict,
        "heldout_data": _as_function(heldout_data),
        "training_data": _as_function(training_data),
        "metrics": metrics,
        "groups": groups,
        "targets": targets,
        "features": features,
        "head": head,
        "score": score,
        "score_parts": _as_function(score_parts),
        "heldout_parts": _as_function(heldout_parts),
    }
    functions = {name: value for name, value in given.items() if value is not None}
    task = make_task(functions, source="sewa_cli.select", args={})
    named = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else checkpoints
    flags = {
        **settings,
        "checkpoints": tuple(Path(path) for path in named),
        "K": K,
        "objective.metric": metric,
        "objective.budget": budget,
        "output": None if output is None else os.fspath(output),
    }
    return run_select(
        load_settings(None, flags, dashes=""), task, events, force=force, write=output is not None
    )


def _as_function(data: Data | None) -> Callable[[], Iterable[Any]] | None:
    if data is None or callable(data):
        return data
    return lambda: data
