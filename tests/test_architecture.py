"""The house: imports point down and never cross between the wings; only the door prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sewa_cli"
FLOORS = {
    "errors": 0,
    "config": 0,
    "dtypes": 0,
    "mask": 1,
    "nest": 1,
    "flat": 1,
    "trajectory": 1,
    "average": 1,
    "adam": 1,
    "bootstrap": 1,
    "geometry": 1,
    "lowrank": 1,
    "report": 1,
    "mapped": 1,
    "solvers": 2,
    "surrogate": 2,
    "methods": 2,
    "evaluate": 2,
    "checkpoints": 2,
    "task": 2,
    "callbacks": 2,
    "write": 2,
    "folders": 2,
    "plots": 3,
    "run": 3,
    "templates": 3,
    "demo": 4,
    "api": 4,
    "cli": 5,
}
MATH = {
    "adam",
    "bootstrap",
    "geometry",
    "lowrank",
    "mask",
    "nest",
    "flat",
    "trajectory",
    "average",
    "solvers",
    "surrogate",
    "methods",
    "evaluate",
}
FILES = {"report", "mapped", "checkpoints", "task", "write", "folders", "callbacks"}


def room(path: Path) -> str:
    """The top-level module that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The sewa_cli modules that a file imports at any place but under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sewa_cli"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "sewa_cli" and len(parts) > 1}
    return found & FLOORS.keys()


SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name not in ("__main__.py",) and path.parent != PACKAGE / "templates" / "init"
]
ROOMS = [path for path in SOURCES if room(path) in FLOORS]


def test_every_module_has_a_floor() -> None:
    assert {room(path) for path in SOURCES} == {*FLOORS, "__init__"}


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_and_never_cross_the_bar(path: Path) -> None:
    here = room(path)
    for target in imports(path) - {here}:
        assert FLOORS[target] <= FLOORS[here], f"{here} imports {target}, which is above it"
        assert not (here in MATH and target in FILES), f"{here} reaches into the file wing"
        assert not (here in FILES and target in MATH), f"{here} reaches into the math wing"


@pytest.mark.parametrize("arguments", [["--help"], ["select", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from sewa_cli.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'safetensors'} & set(sys.modules);"
        "print(heavy, file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert ended.stderr.strip() == "set()"
    assert ended.stdout
