"""Runs as real trainers left them, trained by `tests/frozen/make.py`.

Their tasks are modules that `sewa --task` and the tests import alike: both judge the same losses.
"""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

FROZEN = Path(__file__).parents[1] / "frozen"
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
        name = f"task_{self.folder.name}"
        spec: Any = importlib.util.spec_from_file_location(name, self.folder / "task.py")
        module = importlib.util.module_from_spec(spec)
        with third_party():
            spec.loader.exec_module(module)
        return module


Frozen = Callable[[str], FrozenRun]


def work_on(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FrozenRun:
    """Copy a run to work in, as the working directory."""
    shutil.copytree(FROZEN / name, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return FrozenRun(folder)


@contextmanager
def third_party() -> Iterator[None]:
    """Other people's warnings are not our errors; the random numbers are put back."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def heldout_loss(task: ModuleType, model: nn.Module) -> float:
    """The loss by the plainest loop there is."""

    def outputs(batch: Any) -> Any:
        if hasattr(task, "predict"):
            return task.predict(model, batch)
        return model(**batch).logits if isinstance(batch, dict) else model(batch[0])

    model.eval()
    total = rows = 0.0
    with torch.no_grad():
        for batch in task.heldout_data():
            first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            total += float(task.loss(outputs(batch), batch)) * len(first)
            rows += len(first)
    return total / rows
