"""A tiny run with BatchNorm."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

BATCHNORM_TASK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8 * 4, 3)

    def forward(self, *, signal):   # a signature of its own, reached through predict
        return self.head(torch.relu(self.norm(self.conv(signal))).flatten(1))

def data(seed, rows):
    x = torch.randn(rows, 1, 6, generator=torch.Generator().manual_seed(seed))
    return [{"signal": a, "label": (a.sum((1, 2)) > 0).long()} for a in x.split(100)]

def build_model():
    return Net()

def predict(model, batch):
    return model(signal=batch["signal"])

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["label"])

def training_data():
    return data(0, 450)

def selection_data():
    return data(1, 250)

def heldout_data():
    return data(2, 250)
"""


def make_net() -> nn.Module:
    namespace: dict[str, object] = {}
    exec(BATCHNORM_TASK, namespace)
    build = namespace["build_model"]
    assert callable(build)
    model = build()
    assert isinstance(model, nn.Module)
    return model


def train_batchnorm(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """A real run of the network: step-5 … step-40."""
    folder.mkdir()
    for step, weights in _trained(dtype).items():
        (folder / f"step-{step}.safetensors").write_bytes(weights)


@cache  # trained once a session
def _trained(dtype: torch.dtype) -> dict[int, bytes]:
    files = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(1, 41):
            x = torch.randn(16, 1, 6)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(signal=x), (x.sum((1, 2)) > 0).long())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 5 == 0:
                state = {
                    n: t.to(dtype) if t.is_floating_point() else t
                    for n, t in model.state_dict().items()
                }
                files[step] = save(state)
    return files
