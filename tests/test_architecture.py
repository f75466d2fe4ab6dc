"""The house: imports point down, the core knows no files, and only the command line prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sewa_cli"
FLOORS = [
    {
        "config",
        "settings",
        "errors",
        "direction",
        "dtypes",
        "events",
        "files",
        "interrupts",
        "publish",
        "ranks",
        "system",
        "text",
        "rng",
        "store",
    },
    {"trajectory", "checkpoints", "task", "report", "callbacks"},
    {"objective", "present"},
    {"solvers", "methods", "output", "trackers"},
    {"session"},
    {"comparison"},
    {"commands", "templates"},
    {"api", "demo"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
CORE = {"trajectory", "objective", "solvers", "methods"}  # arithmetic: no file, no Config
OUTSIDE = {"config", "checkpoints", "task", "output", "callbacks"}


def room(path: Path) -> str:
    """The folder or top-level module that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms that a file imports from, at any place."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sewa_cli"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "sewa_cli" and len(parts) > 1}
    return found & FLOOR.keys()


SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__main__.py" and path.parent.parent != PACKAGE / "templates"
]
INSIDE = [path for path in SOURCES if room(path) != "__init__"]


def test_every_module_has_a_floor() -> None:
    assert {room(path) for path in SOURCES} == {*FLOOR, "__init__"}


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    above = [other for other in imports(path) - {here} if FLOOR[other] > FLOOR[here]]
    assert not above, f"{here} imports {above}, which are above it"


@pytest.mark.parametrize(
    "path",
    [path for path in INSIDE if room(path) in CORE],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_core_knows_no_file_and_no_config(path: Path) -> None:
    assert not imports(path) & OUTSIDE


@pytest.mark.parametrize("arguments", [["--help"], ["select", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from sewa_cli.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'safetensors', 'pydantic'} & set(sys.modules);"
        "print(heavy, file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert ended.stderr.strip() == "set()"
    assert ended.stdout
