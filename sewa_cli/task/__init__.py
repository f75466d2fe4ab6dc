"""The functions of the user's module, checked, and every call into them guarded.

The ready-made tasks, such as `task: huggingface`, are the modules in `ready/`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli import ranks
from sewa_cli.config import READY_MADE
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task import checks
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
    """Re-iterable batches from a user's function; a generator function is called again.

    What can be iterated over again is made once, as a DataLoader is costly.
    """

    make: Callable[[], Iterable[Any]]
    name: str
    shared_out: bool = False  # the function takes its rank: of each batch it gives this one's rows
    _made: list[Any] = field(default_factory=list, compare=False)

    def __iter__(self) -> Iterator[Any]:
        with user_code(self.name):
            data = self._data()
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

    def count(self) -> int:
        """Return the number of batches; of a list, or a loader that knows it, without a pass."""
        with user_code(self.name), suppress(TypeError):
            return len(self._data())
        return sum(1 for _ in self)

    def _data(self) -> Any:
        if self._made:
            return self._made[0]
        data = self.make()
        if not isinstance(data, Iterator):
            self._made.append(data)
        return data


@dataclass(frozen=True)
class Task:
    """The user's functions, each guarded.

    source     names the task, also in the report
    sha256     hash of its file as it was imported; None without a file
    files      data that it reads and that no output may overwrite
    warnings   faults of choosing by its data
    summarize  (and observe) of a ready-made task, in place of metrics: from the pass of the loss
    proven     the targets make up the loss, so this need not be checked
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
            module = import_module(f"{__name__}.ready.{spec.replace('-', '_')}")
            ready = module.make(args, newest)
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
    if args:
        _check_args(functions, args, short)

    def with_args(name: str) -> Callable[[], Any]:
        function = functions[name]
        taken = {key: value for key, value in args.items() if _takes(function, key)}
        here = ranks.here()
        own = {"rank": here.rank, "ranks": here.size} if _shares_out(function) else {}
        return lambda: function(**{**taken, **own})

    def batches(name: str) -> Batches | None:
        if name not in functions:
            return None
        return Batches(with_args(name), name, _shares_out(functions[name]))

    def optional(name: str, check: Callable[[Any], Any] | None = None) -> Any:
        return _guarded(name, functions[name], check) if name in functions else None

    scoring = None
    if functions.keys() & {*OF_METRICS, "metrics"}:
        scoring = scoring_of(functions, with_args, short)
    cache_key = None
    if "cache_key" in functions:
        cache_key = _guarded("cache_key", with_args("cache_key"), checks.cache_key)
    return Task(
        source=source,
        build_model=_guarded("build_model", with_args("build_model"), checks.model),
        selection_data=batches("selection_data") or Batches(tuple, "selection_data"),
        loss=_guarded("loss", functions.get("loss") or _lacking(short), checks.loss),
        predict=_guarded("predict", functions.get("predict", default_predict)),
        backward=_guarded("backward of loss", lambda loss: loss.backward()),
        heldout_data=batches("heldout_data"),
        training_data=batches("training_data"),
        metrics=optional("metrics", checks.metrics),
        groups=optional("groups", checks.groups),
        targets=optional("targets", checks.targets),
        features=optional("features", checks.features),
        head=optional("head", checks.head),
        observe=optional("observe"),
        summarize=optional("summarize", checks.metrics),
        parallelize=optional("parallelize"),
        scoring=scoring,
        has_loss="loss" in functions,
        cache_key=cache_key,
    )


def _lacking(source: str) -> Callable[..., Any]:
    """Return a stand-in for the loss of a task that has only a metric."""

    def loss(*_: Any) -> Any:
        raise TaskError(
            f"{source} has no loss(outputs, batch), and this needs one; or use --metric"
        )

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
    """Return whether it names both: `rank` alone may be something else, such as an adapter's."""
    with suppress(TypeError, ValueError):  # a builtin without a signature
        return {"rank", "ranks"} <= inspect.signature(function).parameters.keys()
    return False


def _check_args(functions: Mapping[str, Any], args: Mapping[str, Any], short: str) -> None:
    """Refuse a key that no function takes: a typo in the YAML."""
    takers = [functions[name] for name in TAKES_ARGS if name in functions]
    faults = [
        f"args.{key}: no function in {short} takes it"
        for key in args
        if not any(_takes(function, key) for function in takers)
    ]
    if faults:
        raise ConfigError(*faults)


def _guarded(
    name: str, function: Callable[..., Any], check: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        with user_code(name):
            found = function(*args)
            return found if check is None else check(found)

    return guarded
