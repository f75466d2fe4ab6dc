"""The README's table: `python benchmarks/demo_seeds.py [SEEDS]`, the demo over several seeds.

Held-out loss (and accuracy) of the default beside SeWA's mask of ten and baselines, in
Markdown; a `*` marks the lowest loss of a row, whoever's it is. One seed trains one run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from sewa_cli.commands.select import run_select
from sewa_cli.demo import run_demo
from sewa_cli.events import Events
from sewa_cli.extensions import load_settings
from sewa_cli.report.shared import Measured
from sewa_cli.task import load_task

NAMES = {
    "default": "the default",
    "mask": "SeWA's mask, K=10",
    "baseline": "best baseline by selection rows",
    "last": "last",
    "uniform": "mean of all 100",
}


def row(title: str, cells: list[tuple[float, float]]) -> str:
    best = min(loss for loss, _ in cells)
    shown = [
        f"{loss:.3f}{'*' if loss == best else ''} ({100 * accuracy:.1f} %)"
        for loss, accuracy in cells
    ]
    return f"| {title} | " + " | ".join(shown) + " |"


def numbers(scores: Measured) -> tuple[float, float]:
    if scores.heldout_loss is None or not scores.metrics or scores.metrics["accuracy"] is None:
        raise ValueError("the demo's losses are finite")
    return scores.heldout_loss, scores.metrics["accuracy"]


def main(seeds: int) -> None:
    torch.set_num_threads(1)
    print("| seed | " + " | ".join(NAMES.values()) + " |")
    print("|---" * (len(NAMES) + 1) + "|")
    table = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "demo"
            report = run_demo(folder, seed, Events()).report
            flags = {"K": 10, "seed": seed, "checkpoints": (folder / "ckpts",)}
            config = load_settings(folder / "sewa.yaml", flags)
            mask = run_select(config, load_task(str(folder / "task.py"), {}), write=False).report
        baseline = next(iter(report.references.values()))
        scores = {"default": report.average, "mask": mask.average, "baseline": baseline}
        scores |= report.references
        table.append([numbers(scores[name]) for name in NAMES])
        print(row(str(seed), table[-1]), flush=True)
    columns = [list(column) for column in zip(*table, strict=True)]
    means = [(sum(x[0] for x in c) / seeds, sum(x[1] for x in c) / seeds) for c in columns]
    print(row("mean", means))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
