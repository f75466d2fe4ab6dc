"""Reception: imports the user's module, checks its functions, and guards every call into it.

An exception inside the user's code becomes a `UserCodeError` that shows the user's own frames.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from sewa_cli.config import names_a_file
from sewa_cli.errors import ConfigError, SewaError, TaskError, UserCodeError

if TYPE_CHECKING:
    from torch import Tensor, nn

# name → (signature to show, what it gives)
REQUIRED = {
    "build_model": ("build_model(**args)", "an nn.Module"),
    "selection_data": ("selection_data(**args)", "re-iterable batches that choose the mask"),
    "loss": ("loss(outputs, batch)", "the mean over the batch, differentiable in outputs"),
}
OPTIONAL = {
    "predict": ("predict(model, batch)", "the outputs that loss takes"),
    "heldout_data": ("heldout_data(**args)", "batches that are only ever reported"),
    "training_data": ("training_data(**args)", "batches for BatchNorm statistics"),
    "metrics": ("metrics(model)", 'numbers to report, {"accuracy": 0.93}'),
}
TAKES_ARGS = ("build_model", "selection_data", "heldout_data", "training_data")


@dataclass(frozen=True)
class Batches:
    """Re-iterable batches from a user's function. A generator function is simply called again."""

    make: Callable[[], Iterable[Any]]
    name: str

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
    """The user's functions, each guarded. `source` is what is shown and put into the report."""

    source: str
    build_model: Callable[[], nn.Module]
    selection_data: Batches
    loss: Callable[[Any, Any], Tensor]
    predict: Callable[[nn.Module, Any], Any]
    backward: Callable[[Tensor], None]
    heldout_data: Batches | None = None
    training_data: Batches | None = None
    metrics: Callable[[nn.Module], dict[str, float]] | None = None


def load_task(spec: str, args: Mapping[str, Any]) -> Task:
    """Import `spec` (a .py file or a module name) and make a Task of its functions."""
    _folder.theirs = None
    module = import_user_module(spec)
    functions = {
        name: getattr(module, name)
        for name in (*REQUIRED, *OPTIONAL)
        if getattr(module, name, None) is not None
    }
    return make_task(functions, source=module.__file__ or spec, args=args)


def make_task(functions: Mapping[str, Any], source: str, args: Mapping[str, Any]) -> Task:
    """Check and guard plain functions; each gets those of `args` that it can take."""
    short = Path(source).name
    faults = [
        f"{short} lacks {signature}: {gives}"
        for name, (signature, gives) in REQUIRED.items()
        if name not in functions
    ]
    faults += [
        f"{short}: {name} must be a function" for name, f in functions.items() if not callable(f)
    ]
    if faults:
        raise TaskError("\n".join(faults))
    _check_args(functions, args, short)

    def with_args(name: str) -> Callable[[], Any]:
        function = functions[name]
        taken = {key: value for key, value in args.items() if _takes(function, key)}
        return lambda: function(**taken)

    def batches(name: str) -> Batches | None:
        # made once, as a DataLoader is costly to make, unless it can be iterated over only once
        return Batches(_remember(with_args(name)), name) if name in functions else None

    selection = batches("selection_data")
    assert selection is not None  # REQUIRED was checked above
    return Task(
        source=source,
        build_model=_guarded_model(with_args("build_model")),
        selection_data=selection,
        loss=_guarded_loss(functions["loss"]),
        predict=_guarded("predict", functions.get("predict", default_predict)),
        backward=_guarded("backward of loss", lambda loss: loss.backward()),
        heldout_data=batches("heldout_data"),
        training_data=batches("training_data"),
        metrics=_guarded_metrics(functions["metrics"]) if "metrics" in functions else None,
    )


def default_predict(model: nn.Module, batch: Any) -> Any:
    """model(batch[0]) for a tuple or list, model(**batch) for a dict; .logits if there are any."""
    if isinstance(batch, Mapping):
        outputs = model(
            **{key: value for key, value in batch.items() if _takes(model.forward, key)}
        )
    else:
        outputs = model(batch[0] if isinstance(batch, list | tuple) else batch)
    return getattr(outputs, "logits", outputs)


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Everything raised in here is the user's, and is told as such."""
    ours = Path.cwd()
    if _folder.theirs is not None:
        os.chdir(_folder.theirs)
    try:
        yield
    except SewaError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{name}() raised {type(error).__name__}: {_one_line(error)}"
        raise UserCodeError(message, _frames(error)) from error
    finally:
        if (now := Path.cwd()) != ours:
            _folder.theirs = now
            os.chdir(ours)


class _Folder:
    """Where the user's code has gone with os.chdir: it finds itself there again, and we stay."""

    theirs: Path | None = None


_folder = _Folder()


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split()) or "no message"


def _frames(error: BaseException) -> str:
    """The traceback, only the user's own files; if there are none, all but ours."""
    ours = str(Path(__file__).parent) + os.sep
    libraries = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platlib", "purelib"))
    stack = traceback.extract_tb(_after_us(error.__traceback__, ours))
    outside = [frame for frame in stack if not frame.filename.startswith((ours, "<frozen"))]
    own = [frame for frame in outside if not frame.filename.startswith(libraries)]
    return "".join(traceback.format_list(own or outside)).rstrip()


def _after_us(start: TracebackType | None, ours: str) -> TracebackType | None:
    while start is not None and start.tb_frame.f_code.co_filename.startswith(ours):
        start = start.tb_next
    return start


def import_user_module(spec: str) -> ModuleType:
    """A .py file or a module by name, its exceptions told as the user's."""
    return _import_file(Path(spec)) if names_a_file(spec) else _import_module(spec)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"{path}: no such task file; `sewa init` writes one")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the task can import its neighbours
    # under its own name, as DataLoader workers pickle functions by module; but never in the
    # place of a standard module
    name = path.stem if path.stem not in sys.stdlib_module_names else f"{path.stem}_task"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TaskError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _importing(name):
            return importlib.import_module(name)
    except UserCodeError as error:
        cause = error.__cause__
        missing = isinstance(cause, ModuleNotFoundError) and cause.name is not None
        if missing and (name == cause.name or name.startswith(f"{cause.name}.")):  # type: ignore[union-attr]
            raise TaskError(
                f"{name}: no such module; for a file, write its path: ./{name}.py"
            ) from error
        raise


@contextmanager
def _importing(what: object) -> Iterator[None]:
    try:
        with user_code("import"):
            yield
    except UserCodeError as error:
        cause = error.__cause__
        raise UserCodeError(
            f"{what}: cannot be imported: {type(cause).__name__}: {_one_line(cause)}", error.frames
        ) from cause


def _takes(function: Callable[..., Any], key: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: let it judge for itself
        return True
    return any(
        p.kind is p.VAR_KEYWORD
        or (p.name == key and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        for p in parameters
    )


def _check_args(functions: Mapping[str, Any], args: Mapping[str, Any], short: str) -> None:
    """A key that no function takes is a typing error in the YAML."""
    takers = [functions[name] for name in TAKES_ARGS if name in functions]
    faults = [
        f"args.{key}: no function in {short} takes it"
        for key in args
        if not any(_takes(function, key) for function in takers)
    ]
    if faults:
        raise ConfigError(*faults)


def _remember(make: Callable[[], Any]) -> Callable[[], Any]:
    """Call once and keep the result, if it can be iterated over again."""
    kept: list[Any] = []

    def remembered() -> Any:
        if kept:
            return kept[0]
        data = make()
        if not isinstance(data, Iterator):
            kept.append(data)
        return data

    return remembered


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        with user_code(name):
            return function(*args)

    return guarded


def _guarded_model(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    def guarded() -> nn.Module:
        from torch import nn

        with user_code("build_model"):
            model = build()
        if not isinstance(model, nn.Module):
            raise TaskError(f"build_model() must return an nn.Module, found {type(model).__name__}")
        return model

    return guarded


def _guarded_loss(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tensor]:
    def guarded(outputs: Any, batch: Any) -> Tensor:
        import torch

        with user_code("loss"):
            value = function(outputs, batch)
        if not isinstance(value, torch.Tensor):
            raise TaskError(f"loss() must return a tensor, found {type(value).__name__}")
        if value.numel() != 1:
            raise TaskError(
                f"loss() must return one number, the mean over the batch; "
                f"found a tensor of shape {list(value.shape)}"
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise TaskError(
                "loss() has no gradient: predict or loss leaves autograd "
                "(.detach(), .item(), no_grad, argmax)"
            )
        return value

    return guarded


def _guarded_metrics(function: Callable[[Any], Any]) -> Callable[[nn.Module], dict[str, float]]:
    def guarded(model: nn.Module) -> dict[str, float]:
        with user_code("metrics"):
            values = function(model)
            if not isinstance(values, Mapping):
                raise TaskError(
                    f'metrics() must return a dict like {{"accuracy": 0.93}}, '
                    f"found {type(values).__name__}"
                )
            return {str(name): float(value) for name, value in values.items()}

    return guarded
