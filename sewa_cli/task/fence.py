"""A fence around the user's code: its imports, its exceptions.

An exception inside the user's code becomes a `UserCodeError` that shows the user's own frames.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType

from sewa_cli.config import names_a_file
from sewa_cli.errors import SewaError, TaskError, UserCodeError
from sewa_cli.text import one_line


@contextmanager
def user_code(name: str, may_move: bool = False) -> Iterator[None]:
    """Report what is raised in here as the user's.

    The working directory is the process's, so only an import may change it for good.
    """
    before = os.getcwd()  # noqa: PTH109 - called for every batch: a Path takes ten times as long
    try:
        yield
    except SewaError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{name}() raised {_named(error)}"
        raise UserCodeError(message, _frames(error)) from error
    if os.getcwd() != before and not may_move:  # noqa: PTH109
        raise TaskError(
            f"{name}(): changes the working directory; use absolute paths, or call "
            "os.chdir where the task is imported"
        )


def _named(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {one_line(error) or 'no message'}"


def _frames(error: BaseException) -> str:
    """The traceback through the user's own files; if there are none, through all but ours."""
    ours = str(Path(__file__).parents[1]) + os.sep
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
    """A .py file, or a module by name; its exceptions are reported as the user's."""
    return _import_file(Path(spec)) if names_a_file(spec) else _import_module(spec)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"{path}: no such task file; `sewa init` writes one")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the task can import its neighbours
    # under its own name, as DataLoader workers pickle functions by module; but never in place
    # of a standard module
    name = path.stem if path.stem not in sys.stdlib_module_names else f"{path.stem}_task"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TaskError(f"{path}: is not a Python file; name a .py file")
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
                f"{name}: no such module; for a file, give its path: ./{name}.py"
            ) from error
        raise


@contextmanager
def _importing(what: object) -> Iterator[None]:
    try:
        with user_code("import", may_move=True):
            yield
    except UserCodeError as error:
        cause = error.__cause__
        raise UserCodeError(f"{what}: cannot be imported: {_named(cause)}", error.frames) from cause
