"""The Gumbel solver's settings on the demo: `python benchmarks/settings.py`, a Markdown table.

Trains the demo's run for each seed once, then selects with one setting changed at a time.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from sewa_cli.commands.select import run_select
from sewa_cli.demo import run_demo
from sewa_cli.events import Events
from sewa_cli.extensions import load_settings
from sewa_cli.task import load_task

CHANGES: list[dict[str, Any]] = [
    {},
    {"normalize": "paper"},
    {"temperature": 0.25},
    {"temperature": 1.0},
    {"samples": 1},
    {"samples": 4},
    {"batches": 2},
    {"iterations": 30},
    {"iterations": 300},
    {"lr": 0.1},
    {"lr": 1.0},
]


def main(seeds: int) -> None:
    torch.set_num_threads(1)
    print("| changed | selection loss | held-out loss |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / str(seed) for seed in range(seeds)]
        for seed, folder in enumerate(folders):
            run_demo(folder, seed, Events())
        for change in CHANGES:
            selection = heldout = 0.0
            for seed, folder in enumerate(folders):
                flags = {"K": 10, "seed": seed, "gumbel": change}
                config = load_settings(folder / "sewa.yaml", flags)
                task = load_task(str(folder / "task.py"), {})
                average = run_select(config, task, write=False).report.average
                selection += (average.selection_loss or float("nan")) / seeds
                heldout += (average.heldout_loss or float("nan")) / seeds
            name = ", ".join(f"`{key}: {value}`" for key, value in change.items()) or "the defaults"
            print(f"| {name} | {selection:.4f} | {heldout:.4f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
