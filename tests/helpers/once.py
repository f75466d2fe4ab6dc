"""Runs that are slow to make: made once for all workers of a session, then copied."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from helpers.shells import environment
from helpers.tiny import Ended

MadeOnce = Callable[[str, Callable[[Path], object]], Path]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` was given empty to fill. Copy it; nobody writes into it."""
    session = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent  # which the workers have in common
    folder = session / "once" / name
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = folder.with_name(f"{name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(folder)
    return folder


@dataclass(frozen=True)
class Demo:
    """The folder that `sewa demo here` left, in a process of its own, and how it ended."""

    folder: Path
    ended: Ended


def run_demo(folder: Path) -> None:
    command = [sys.executable, "-m", "sewa_cli", "demo", "here"]
    ended = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    said = [ended.returncode, ended.stdout, ended.stderr]
    (folder / "ended.json").write_text(json.dumps(said))


def demo_in(folder: Path) -> Demo:
    return Demo(folder / "here", Ended(*json.loads((folder / "ended.json").read_text())))
