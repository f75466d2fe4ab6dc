"""The cost of a callback: `save_weights` against the same bytes written plainly.

python benchmarks/saving.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

from sewa_cli.callbacks import save_weights


def main() -> None:
    print("| weights | file | save_weights | as bf16 | plain write and fsync |")
    print("|---|---|---|---|---|")
    for width in (512, 1024, 2048):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))
        with tempfile.TemporaryDirectory() as folder:
            report(model, Path(folder))


def report(model: nn.Module, folder: Path) -> None:
    content = save_weights(model, folder, 1).read_bytes()

    def write_plainly() -> None:
        with (folder / "plain").open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())

    times = [
        milliseconds(lambda: save_weights(model, folder, 1)),
        milliseconds(lambda: save_weights(model, folder, 2, dtype=torch.bfloat16)),
        milliseconds(write_plainly),
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    shown = " | ".join(f"{time:.0f} ms" for time in times)
    print(f"| {count / 1e6:.1f} M | {len(content) / 1e6:.0f} MB | {shown} |")


def milliseconds(job: Callable[[], object], repeats: int = 7) -> float:
    """The median of several calls."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        job()
        times.append(1000 * (perf_counter() - start))
    return median(times)


if __name__ == "__main__":
    main()
