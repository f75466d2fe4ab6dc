"""Count the project's functions that a small default `select` through the API executes.

    python benchmarks/functions.py [--list]

Comprehensions and imports are not counted. The number says how much somebody has to read to follow
one run from its checkpoints to the averaged file.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli import select
from sewa_cli.errors import SewaError

PACKAGE = str(Path(sys.modules[SewaError.__module__].__file__ or "").parent)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>", "<module>"}


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(seed))
    labels = (x[:, 0] * x[:, 1] > 0).long()
    return [(x[:200], labels[:200]), (x[200:], labels[200:])]


def train(folder: Path) -> None:
    """Save twelve checkpoints of a run with a large learning rate and small batches."""
    torch.manual_seed(0)
    folder.mkdir()
    model, draw = build_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, labels = (torch.cat(parts) for parts in zip(*batches(0), strict=True))
    for step in range(1, 121):
        some = torch.randint(len(x), (16,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), labels[some]).backward()
        optimizer.step()
        if step % 10 == 0:
            save_file(model.state_dict(), folder / f"step-{step}.safetensors")


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def run_select(folder: Path, output: str) -> None:
    select(
        folder / "ckpts",
        model=build_model(),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        selection_data=batches(1),
        heldout_data=batches(2),
        output=folder / output,
        device="cpu",
    )


def count_functions(folder: Path) -> Counter[str]:
    """Return how many functions of each file a second run executes: the first has imported all."""
    train(folder / "ckpts")
    run_select(folder, "first.safetensors")
    seen: set[tuple[str, str, int]] = set()

    def look(frame: FrameType, event: str, arg: Any) -> None:
        del arg
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS
        if event == "call" and is_ours:
            seen.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    sys.setprofile(look)
    try:
        run_select(folder, "second.safetensors")
    finally:
        sys.setprofile(None)
    return Counter(str(Path(file).relative_to(PACKAGE)) for file, _, _ in seen)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        counts = count_functions(Path(folder))
    print(f"{counts.total()} functions in {len(counts)} files")
    if "--list" in sys.argv:
        for file, count in counts.most_common():
            print(f"{count:4} {file}")


if __name__ == "__main__":
    main()
