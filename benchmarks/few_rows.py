"""The default with few examples: `python benchmarks/few_rows.py [DRAWS]`, some ten minutes.

The demo's runs of two seeds, all of their checkpoints and the last thirty; so many rows to choose
by, drawn anew each time from the demo's selection and held-out images, judged on the rest of them.
The default beside one that learns on top of moving averages however few the rows are, and beside
the best simple average by the same rows.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import torch
from common import markdown
from torch import Tensor

from sewa_cli import select
from sewa_cli.demo import run_demo
from sewa_cli.events import Events
from sewa_cli.report.select import Blend, Report
from sewa_cli.task import Task, load_task

SEEDS = (0, 1)
ROWS = (10, 30, 60, 100, 200)
LASTS = (100, 30)
VARIANTS = {"the default": Blend.FEW, "learning on top of it by any rows": 0}


def main(draws: int) -> None:
    torch.set_num_threads(1)
    found = defaultdict[tuple[str, int], list[float]](list)  # behind the best simple, in %
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "demo"
            run_demo(folder, seed, Events())
            task = load_task(str(folder / "task.py"), {})
            for rows in ROWS:
                for draw in range(draws):
                    parts = drawn(task, rows, draw)
                    for last in LASTS:
                        for name, few in VARIANTS.items():
                            Blend.FEW = few
                            report = chosen(folder, task, last, *parts)
                            found[name, rows].append(behind(report))
    shown = [
        {"rows": f"{rows}"} | {name: summary(found[name, rows]) for name in VARIANTS}
        for rows in ROWS
    ]
    print(markdown(shown))


def drawn(task: Task, rows: int, draw: int) -> tuple[list[Tensor], list[Tensor]]:
    """Images and labels to choose by, and all others."""
    assert task.selection_data is not None
    assert task.heldout_data is not None
    batches = [*task.selection_data, *task.heldout_data]
    order = torch.randperm(
        sum(len(labels) for _, labels in batches), generator=torch.Generator().manual_seed(draw)
    )
    both = [torch.cat(part)[order] for part in zip(*batches, strict=True)]
    return [part[:rows] for part in both], [part[rows:] for part in both]


def chosen(
    folder: Path, task: Task, last: int, selection: list[Tensor], heldout: list[Tensor]
) -> Report:
    return select(
        folder / "ckpts",
        model=task.build_model(),
        loss=task.loss,
        selection_data=[tuple(selection)],
        heldout_data=[tuple(heldout)],
        last=last,
        device="cpu",
    ).report


def behind(report: Report) -> float:
    simple = next(iter(report.references.values())).heldout_loss
    assert report.average.heldout_loss is not None
    assert simple is not None
    return 100 * (report.average.heldout_loss / simple - 1)


def summary(values: list[float]) -> str:
    half = 1.96 * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):+.1f} ± {half:.1f}, worst {max(values):+.0f}"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
