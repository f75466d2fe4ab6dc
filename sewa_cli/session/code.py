"""The Python files that a task is made of: the user's own, and all that they import of these."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path

from sewa_cli.config import READY_MADE, Config
from sewa_cli.files import MIB, read_bytes, real
from sewa_cli.task import Task

_DYNAMIC = "transformers_modules"  # where transformers puts code that it finds in a checkpoint


class Unknown(Exception):
    """Something whose content cannot be told; says what, and what may help."""


def code(config: Config, task: Task, more: set[Path]) -> tuple[dict[Path, bytes], set[str]]:
    """The user's files, all that they import of the user's own, and what else they import."""
    return _read_all(_named(config, task), {*more, *imported()})


def code_hash(config: Config, task: Task) -> str | None:
    """SHA-256 of the user's files and what they import of the user's own; None: there are none.

    For reports: it tells two tasks of one name apart, and is the same wherever copies of them are.
    """
    methods = config.compare.methods_from
    with suppress(Unknown):
        more = {real(methods)} if methods is not None and methods.is_file() else set()
        found, _ = _read_all(_named(config, task), more)
        contents = sorted((path.name, content) for path, content in found.items())
        return sha256(repr(contents).encode()).hexdigest() if found else None
    return None


def _named(config: Config, task: Task) -> list[Path]:
    files = [] if config.solver_from is None else [config.solver_from]
    if task.source not in READY_MADE:
        if not (task.source.endswith(".py") and Path(task.source).is_file()):
            raise Unknown("the task's functions, which are not in a Python file")
        files.append(Path(task.source))
    return [real(file) for file in files]


def _read_all(named: list[Path], more: set[Path]) -> tuple[dict[Path, bytes], set[str]]:
    """These and all that they import, and the names of what is not of the user's own."""
    found: dict[Path, bytes] = {}
    others: set[str] = set()
    looked_for: set[str] = set()
    left = [*named, *more]
    roots = [*(file.parent for file in named), *_roots()]
    while left:
        path = left.pop()
        if path in found:
            continue
        is_text = path.suffix == ".py"
        try:
            found[path] = read_bytes(path, (16 if is_text else 1024) * MIB)
        except OSError as error:
            raise Unknown(f"{path} ({error.strerror})") from error
        for name in _imports(found[path], path, roots) if is_text else ():
            if name in looked_for:
                continue
            looked_for.add(name)
            package = name.partition(".")[0]
            if package in sys.stdlib_module_names:
                continue
            there = file_of(package)
            is_installed = there is not None and not is_own(package, there)
            files = [] if is_installed else _files_of(name, roots)
            left += [real(file) for file in files]
            if not files:
                others.add(package)
    return found, others


def imported() -> set[Path]:
    """The files of all modules that Python has by now, but for its own, installed ones and ours.

    However they came there: by a name that was put together, or through an import hook.
    """
    return {real(Path(file)) for file in _own_modules().values()}


def _own_modules() -> dict[str, str]:
    named = {name: file_of(name) for name in [*sys.modules] if name != "__main__"}
    return {name: file for name, file in named.items() if file and is_own(name, file)}


def file_of(module: str) -> str | None:
    """Without asking the module itself: a lazy one would import everything that it has."""
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def is_own(module: str, file: str | None) -> bool:
    """Whether a module is the user's: not of Python, of an installed package, torch's or ours."""
    package = module.partition(".")[0]
    if file is None or package in ("sewa_cli", "torch"):  # which makes some in /tmp
        return False
    return package == _DYNAMIC or not _is_installed(file)


@cache
def _is_installed(file: str) -> bool:
    path = Path(file)
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return True
    return any(path.is_relative_to(one) or real(path).is_relative_to(one) for one in _python())


@cache
def _python() -> set[Path]:
    own = {Path(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib")}
    return own | {real(path) for path in own}


def _roots() -> list[Path]:
    """Where Python looks for modules, or has found some, but for its own and installed ones."""
    paths = [Path(entry or ".") for entry in sys.path]
    for name, file in _own_modules().items():
        if "." not in name:
            is_package = Path(file).stem == "__init__"
            paths.append(Path(file).parents[1 if is_package else 0])
    inside = [path for path in dict.fromkeys(paths) if not _is_installed(str(path))]
    return [path for path in inside if path.is_dir() and path != Path(__file__).parents[2]]


def _imports(source: bytes, path: Path, roots: Iterable[Path]) -> Iterator[str]:
    """Names of modules, wherever in the file they are imported."""
    for level, module, names in _statements(source):
        package = _package(path, level, roots) if level else ""
        around = ".".join(part for part in (package, module) if part)
        yield from (f"{around}.{name}" if around else name for name in names)


@lru_cache(maxsize=1024)
def _statements(source: bytes) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Of each import: how many folders up it starts, from which module, which names."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(
        (
            getattr(node, "level", 0),
            getattr(node, "module", "") or "",
            tuple(a.name for a in node.names),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def _package(path: Path, level: int, roots: Iterable[Path]) -> str:
    """The dotted name of the folder that a relative import starts from."""
    folder = path.parents[level - 1]
    for root in roots:
        with suppress(ValueError):
            return ".".join(folder.relative_to(real(root)).parts)
    return ""


def _files_of(name: str, roots: Iterable[Path]) -> list[Path]:
    """The files of a module and of the packages around it; none if it is not of the user's."""
    for root in roots:
        here, found = root, list[Path]()
        for part in name.split("."):
            if (module := here / f"{part}.py").is_file():
                return [*found, module]
            here = here / part
            if (module := here / "__init__.py").is_file():
                found.append(module)
        if found:
            return found
    return []
