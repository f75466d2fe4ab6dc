"""A tiny real run, and what a command of `sewa` has ended with."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save
from torch import nn
from torch.nn import functional as F

TASK = """
import torch
from torch import nn
from torch.nn import functional as F

def data(seed, rows=300):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return list(zip(x.split(128), y.split(128)))   # the last batch is short

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def selection_data():
    return data(1)

def heldout_data():
    return data(2)

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])
"""
WEIGHTS = 4 * (6 * 16 + 16 + 16 * 2 + 2)  # bytes of a checkpoint


def train_tiny(folder: Path, k: int = 12, dtype: torch.dtype = torch.float32) -> list[Path]:
    """A real run of the TASK network at a noisy learning rate: step-10 … step-(10·k)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for step, weights in _trained(k, dtype).items():
        paths.append(folder / f"step-{step}.safetensors")
        paths[-1].write_bytes(weights)
    return paths


@cache  # trained once a session
def _trained(k: int, dtype: torch.dtype) -> dict[int, bytes]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    files = {}
    for step in range(1, 10 * k + 1):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 0:
            files[step] = save({n: t.to(dtype) for n, t in model.state_dict().items()})
    return files


def user_loss(weights: Path | str, data: str, task: str = "task.py") -> float:
    """The loss of a file as its user would compute it, with nothing of ours."""
    user = runpy.run_path(task)
    model = user["build_model"]()
    load_model(model, weights)
    total, rows = 0.0, 0
    for batch in user[data]():
        with torch.no_grad():
            total += len(batch[0]) * float(user["loss"](model.eval()(batch[0]), batch))
        rows += len(batch[0])
    return total / rows


def report_of(path: Path | str = "averaged.report.json") -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def finding(report: dict[str, Any], kind: str) -> Any:
    """Return the report's finding of a kind, or None."""
    return next((one for one in report.get("findings", ()) if one["kind"] == kind), None)


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, without Python's cache of the user's module."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("error: ")


Sewa = Callable[..., Ended]
