"""Runs as real trainers left them, trained by `tests/frozen/make.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest

from helpers.trainers import FROZEN, load_task

RUNS = sorted(path.parent.name for path in FROZEN.glob("*/task.py"))
STEPS = list(range(2, 17, 2))


@dataclass(frozen=True)
class FrozenRun:
    """A folder with task.py and run/; PEFT's has the base model in base/."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "run"

    @cached_property
    def task(self) -> ModuleType:
        """Import task.py, which may import its trainer: seconds."""
        return load_task(self.folder)


Frozen = Callable[[str], FrozenRun]


def work_on(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FrozenRun:
    """Copy a run to work in, as the working directory."""
    shutil.copytree(FROZEN / name, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return FrozenRun(folder)
