"""Checks the functions of the user's module and guards every call into it.

`task: huggingface`, `classification` and `gymnasium` are modules of our own, in `ready/`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli import ranks
from sewa_cli.config import READY_MADE
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task.fence import import_user_module, user_code
from sewa_cli.task.scoring import FUNCTIONS as OF_METRICS
from sewa_cli.task.scoring import Scoring, scoring_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sewa_cli.checkpoints import Checkpoint

__all__ = [
    "Batches",
    "Task",
    "default_predict",
    "import_user_module",
    "load_task",
    "make_task",
    "user_code",
]

# name → (its signature, what it returns)
REQUIRED = {
    "build_model": ("build_model(**args)", "an nn.Module"),
    "selection_data": ("selection_data(**args)", "re-iterable batches to choose with"),
    "loss": ("loss(outputs, batch)", "the mean over the batch, differentiable in outputs"),
}
OPTIONAL = (
    "predict",
    "heldout_data",
    "training_data",
    "metrics",
    "groups",
    "targets",
    "features",
    "head",
    "parallelize",
    "cache_key",
    *OF_METRICS,
)
NEEDS = {"features": ("head", "targets"), "head": ("features",)}
TAKES_ARGS = (
    *("build_model", "selection_data", "heldout_data", "training_data"),
    *("score_parts", "heldout_parts", "cache_key"),
)


@dataclass(frozen=True)
class Batches:
    """Re-iterable batches from a user's function; a generator function is called again."""

    make: Callable[[], Iterable[Any]]
    name: str
    anew: Callable[[], Iterable[Any]] | None = None  # the function itself, where `make` remembers
    shared_out: bool = False  # the function takes its rank: of each batch it gives this one's rows

    def apart(self) -> Batches:
        """The same made anew: to go over it leaves no trace in this one."""
        return self if self.anew is None else replace(self, make=_remember(self.anew), anew=None)

    def __iter__(self) -> Iterator[Any]:
        with user_code(self.name):
            data = self.make()
            if not isinstance(data, Iterable):
                raise TaskError(
                    f"{self.name}() must return batches that can be iterated over, "
                    f"found {type(data).__name__}"
                )
            batches = iter(data)
        while True:
            with user_code(self.name):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


@dataclass(frozen=True)
class Task:
    """The user's functions, each guarded. `source` names the task, also in the report.

    sha256: of its file as it was imported; None: it is in no file of its own.
    files: the data it reads, never to be overwritten; notes: what the user should know about it;
    warnings: what is wrong with choosing by its data. Ready-made tasks have `summarize` (and
    `observe`) in place of `metrics`: numbers from the pass that gives the loss. They are `proven`:
    that their targets make up their loss is tested here.
    """

    source: str
    build_model: Callable[[], nn.Module]
    selection_data: Batches
    loss: Callable[[Any, Any], Tensor]
    predict: Callable[[nn.Module, Any], Any]
    backward: Callable[[Tensor], None]
    heldout_data: Batches | None = None
    training_data: Batches | None = None
    metrics: Callable[[nn.Module], dict[str, float]] | None = None
    groups: Callable[[Any], list[Hashable]] | None = None  # a label for each example of a batch
    targets: Callable[[Any], tuple[Tensor, Tensor | None]] | None = None
    features: Callable[[nn.Module, Any], Tensor | None] | None = None
    head: Callable[[nn.Module, Tensor], Tensor] | None = None
    observe: Callable[[Any, Any], Tensor] | None = None
    summarize: Callable[..., dict[str, float]] | None = None
    parallelize: Callable[[nn.Module, Any], Any] | None = None  # model, mesh: of several ranks
    scoring: Scoring | None = None  # a metric to choose by
    has_loss: bool = True  # else `loss` says what is missing, and there are no data
    proven: bool = False
    cache_key: Callable[[], str] | None = None  # what else its results depend on
    sha256: str | None = None
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def load_task(
    spec: str, args: Mapping[str, Any], newest: Callable[[], Checkpoint] | None = None
) -> Task:
    """Make a Task from `spec`: a .py file, the name of a ready-made task, or of a module.

    `newest` opens the newest of the checkpoints, for a ready-made task that is made from it.
    """
    if spec in READY_MADE:
        with user_code(spec):
            ready = import_module(f"{__name__}.ready.{spec}").make(args, newest)
        task = make_task(ready.functions, source=spec, args={})
        return replace(
            task, files=ready.files, notes=ready.notes, warnings=ready.warnings, proven=True
        )
    module = import_user_module(spec)
    functions = {
        name: getattr(module, name)
        for name in (*REQUIRED, *OPTIONAL)
        if getattr(module, name, None) is not None
    }
    if module.__file__ is None:  # a package without code of its own
        return make_task(functions, source=spec, args=args)
    sha256 = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    return replace(make_task(functions, source=module.__file__, args=args), sha256=sha256)


def make_task(functions: Mapping[str, Any], source: str, args: Mapping[str, Any]) -> Task:
    """Check and guard plain functions; each gets those of `args` that it takes."""
    short = Path(source).name
    by_metric = {"score", "scores"} & functions.keys() or (
        "metrics" in functions and not {"loss", "selection_data"} & functions.keys()
    )
    required = {"build_model"} if by_metric else {*REQUIRED}
    required |= {"selection_data"} if "loss" in functions else set()
    faults = [
        f"{short} lacks {signature}: {gives}"
        for name, (signature, gives) in REQUIRED.items()
        if name not in functions and name in required
    ]
    faults += [
        f"{short}: {name} must be a function" for name, f in functions.items() if not callable(f)
    ]
    faults += [
        f"{short}: {name} needs {other}: predict is head(model, features(model, batch)), and "
        "targets say what its outputs are compared with"
        for name, others in NEEDS.items()
        for other in others
        if name in functions and other not in functions
    ]
    if faults:
        raise TaskError(*faults)
    _check_args(functions, args, short)

    def with_args(name: str) -> Callable[[], Any]:
        function = functions[name]
        taken = {key: value for key, value in args.items() if _takes(function, key)}
        here = ranks.here()
        own = {"rank": here.rank, "ranks": here.size} if _shares_out(function) else {}
        return lambda: function(**{**taken, **own})

    def batches(name: str) -> Batches | None:
        # made once, as a DataLoader is costly, unless it can be iterated over only once
        if name not in functions:
            return None
        shared_out = _shares_out(functions[name])
        return Batches(_remember(with_args(name)), name, with_args(name), shared_out)

    def optional(name: str, checked: Callable[[Any], Any] = _as_is) -> Callable[..., Any] | None:
        return _guarded(name, functions[name], checked) if name in functions else None

    return Task(
        source=source,
        build_model=_guarded("build_model", with_args("build_model"), _checked_model),
        selection_data=batches("selection_data") or Batches(tuple, "selection_data"),
        loss=_guarded("loss", functions.get("loss", _lacking(short)), _checked_loss),
        predict=_guarded("predict", functions.get("predict", default_predict)),
        backward=_guarded("backward of loss", lambda loss: loss.backward()),
        heldout_data=batches("heldout_data"),
        training_data=batches("training_data"),
        metrics=optional("metrics", _checked_metrics),
        groups=optional("groups", _checked_groups),
        targets=optional("targets", _checked_targets),
        features=optional("features", partial(_checked_tensor, "features")),
        head=optional("head", partial(_checked_tensor, "head")),
        observe=optional("observe"),
        summarize=optional("summarize", _checked_metrics),
        parallelize=optional("parallelize"),
        scoring=scoring_of(functions, with_args, short),
        has_loss="loss" in functions,
        cache_key=_guarded("cache_key", with_args("cache_key"), _checked_text)
        if "cache_key" in functions
        else None,
    )


def _lacking(source: str) -> Callable[..., Any]:
    """In the place of a loss that a metric does without."""

    def loss(*_: Any) -> Any:
        raise TaskError(f"{source} has no loss(outputs, batch), and this needs one; or --metric")

    return loss


def default_predict(model: nn.Module, batch: Any) -> Any:
    """model(batch[0]) for a tuple or list, model(**batch) for a dict; .logits if there are any."""
    if isinstance(batch, Mapping):
        outputs = model(
            **{key: value for key, value in batch.items() if _takes(model.forward, key)}
        )
    else:
        outputs = model(batch[0] if isinstance(batch, list | tuple) else batch)
    return getattr(outputs, "logits", outputs)


def _takes(function: Callable[..., Any], key: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: let it decide itself
        return True
    return any(
        p.kind is p.VAR_KEYWORD
        or (p.name == key and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        for p in parameters
    )


def _shares_out(function: Callable[..., Any]) -> bool:
    """Whether it names both of them: `rank` alone may well be something else, as an adapter's."""
    with suppress(TypeError, ValueError):  # a builtin without a signature
        return {"rank", "ranks"} <= inspect.signature(function).parameters.keys()
    return False


def _check_args(functions: Mapping[str, Any], args: Mapping[str, Any], short: str) -> None:
    """A key that no function takes is a typo in the YAML."""
    takers = [functions[name] for name in TAKES_ARGS if name in functions]
    faults = [
        f"args.{key}: no function in {short} takes it"
        for key in args
        if not any(_takes(function, key) for function in takers)
    ]
    if faults:
        raise ConfigError(*faults)


def _remember(make: Callable[[], Any]) -> Callable[[], Any]:
    """Call once and keep the result if it can be iterated over again."""
    kept: list[Any] = []

    def remembered() -> Any:
        if kept:
            return kept[0]
        data = make()
        if not isinstance(data, Iterator):
            kept.append(data)
        return data

    return remembered


def _as_is(value: Any) -> Any:
    return value


def _guarded(
    name: str, function: Callable[..., Any], checked: Callable[[Any], Any] = _as_is
) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        with user_code(name):
            return checked(function(*args))

    return guarded


def _checked_model(model: Any) -> nn.Module:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TaskError(f"build_model() must return an nn.Module, found {type(model).__name__}")
    return model


def _checked_loss(value: Any) -> Tensor:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TaskError(f"loss() must return a tensor, found {type(value).__name__}")
    if value.numel() != 1:
        raise TaskError(
            f"loss() must return one number, the mean over the batch; "
            f"found a tensor of shape {list(value.shape)}"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise TaskError(
            "loss() has no gradient: predict or loss breaks it off "
            "(.detach(), .item(), no_grad, argmax)"
        )
    return value


def _checked_groups(value: Any) -> list[Hashable]:
    """Labels, as Python's own numbers where they come as an array."""
    found = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(found, list | tuple)
    if not is_list or not all(isinstance(label, Hashable) for label in found):
        raise TaskError(
            "groups() must return a list of labels, one for each example of the batch, found "
            f"{type(value).__name__}"
        )
    return list(found)


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TaskError(f"cache_key() must return text, found {type(value).__name__}")
    return value


def _checked_targets(value: Any) -> tuple[Tensor, Tensor | None]:
    """Classes, and their weights if there are any."""
    import torch

    targets, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(targets, torch.Tensor):
        raise TaskError(
            "targets() must return a tensor of classes, or a pair of one and its weights; found "
            f"{type(targets).__name__}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TaskError(f"targets() must return whole numbers, found {targets.dtype}")
    if weights is None or isinstance(weights, torch.Tensor):
        return targets, weights
    if not isinstance(weights, int | float):
        raise TaskError(f"targets(): weights must be a tensor, found {type(weights).__name__}")
    return targets, torch.tensor(float(weights))


def _checked_tensor(name: str, value: Any) -> Tensor | None:
    """Of one dimension or more; of a model without a head, features() has none."""
    import torch

    if value is None and name == "features":
        return None
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TaskError(f"{name}() must return a tensor [..., n], found {found}")
    return value


def _checked_metrics(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise TaskError(
            f'metrics() must return a dict like {{"accuracy": 0.93}}, found {type(values).__name__}'
        )
    return {str(name): float(value) for name, value in values.items()}
