"""Forward passes where freed memory is kept, and where not: `python benchmarks/passes.py`.

What `sewa_cli.cli.main.keep_memory` is worth here, one thread. It holds for a whole process and
cannot be taken back, so each contestant is a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from math import inf

import torch
from common import finish, processor, race
from torch import Tensor, nn

from sewa_cli.cli.main import keep_memory

CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    *(nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)),) * 4,
)
TRANSFORMER = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2)
LINEAR = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()),) * 4)
MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "convolutions, 100 images of 32 × 32": (CONVOLUTIONS, torch.randn(100, 3, 32, 32)),
    "convolutions, 500 images of 32 × 32": (CONVOLUTIONS, torch.randn(500, 3, 32, 32)),
    "transformer, 100 texts of 128 tokens": (TRANSFORMER, torch.randn(100, 128, 64)),
    "transformer, 500 texts of 128 tokens": (TRANSFORMER, torch.randn(500, 128, 64)),
    "linear layers, 1,000 rows of 256": (LINEAR, torch.randn(1000, 256)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--child", choices=["kept", "not kept"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        if given.child == "kept":
            keep_memory()
        print(*milliseconds())
        return
    best: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for kind in ("kept", "not kept"):
            command = [sys.executable, __file__, "--child", kind]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = map(float, printed.split())
            best[kind] = [*map(min, best.get(kind, [inf] * len(MODELS)), found)]
    print(f"{processor()}, one thread\n")
    rows = [
        {"pass": name, "kept, ms": kept, "not kept, ms": plain, "faster": f"{plain / kept:.1f} ×"}
        for name, kept, plain in zip(MODELS, best["kept"], best["not kept"], strict=True)
    ]
    finish("passes", rows, given.json)


@torch.no_grad()
def milliseconds() -> list[float]:
    torch.set_num_threads(1)
    passes = {name: partial(m.eval(), x) for name, (m, x) in MODELS.items()}
    return [1e3 * seconds for seconds in race(passes, rounds=10).values()]


if __name__ == "__main__":
    main()
