"""Tiny real runs, and the command line called in-process with its real file descriptors."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.cli import main

torch.set_num_threads(1)
# a shared machine: how long one example takes says nothing; in CI the same examples every time
hypothesis.settings.register_profile("shared", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("shared")

# what nohup or a background job ignores, the commands that tests start would ignore too
for _name, _default in (
    ("SIGINT", signal.default_int_handler),
    ("SIGTERM", signal.SIG_DFL),
    ("SIGHUP", signal.SIG_DFL),
):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

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


def train_tiny(folder: Path, k: int = 12, dtype: torch.dtype = torch.float32) -> list[Path]:
    """A real run of the TASK network at a noisy learning rate: step-10 … step-(10·k)."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    paths = []
    for step in range(1, 10 * k + 1):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 0:
            paths.append(folder / f"step-{step}.safetensors")
            save_file({n: t.to(dtype) for n, t in model.state_dict().items()}, paths[-1])
    return paths


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user: sewa.yaml, task.py and twelve checkpoints in ckpts/."""
    train_tiny(tmp_path / "ckpts")
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "sewa.yaml").write_text(
        textwrap.dedent("""\
            task: ./task.py
            checkpoints: ckpts/
            K: 4
            device: cpu
            gumbel: {iterations: 8}
        """)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


@pytest.fixture
def sewa(capfd: pytest.CaptureFixture[str]) -> Sewa:
    """sewa("select", "ckpts/", "--K", "4") → exit code, stdout, stderr."""

    def call(*arguments: object) -> Ended:
        capfd.readouterr()
        # the command keeps standard output to itself until its process ends; ours goes on
        stdout, kept = sys.stdout, os.dup(1)
        try:
            code = main([str(argument) for argument in arguments])
        finally:
            sys.stdout = stdout
            os.dup2(kept, 1)
            os.close(kept)
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return call
