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


def write_checkpoints(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    folder.mkdir()
    for step in range(1, 13):
        save_file(
            {
                name: value + 0.1 * torch.randn_like(value)
                for name, value in model.state_dict().items()
            },
            folder / f"step-{step}.safetensors",
        )


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(seed))
    return [(x[:100], (x[:100, 0] > 0).long()), (x[100:], (x[100:, 0] > 0).long())]


def run_select(folder: Path, output: str) -> None:
    select(
        folder / "ckpts",
        model=nn.Linear(4, 2),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        selection_data=batches(1),
        heldout_data=batches(2),
        output=folder / output,
        device="cpu",
    )


def count_functions(folder: Path) -> Counter[str]:
    """Return how many functions of each file a second run executes: the first has imported all."""
    write_checkpoints(folder / "ckpts")
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
