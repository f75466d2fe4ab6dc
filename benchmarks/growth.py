"""How the cost of `sewa select` grows.

    python benchmarks/growth.py --plot docs/images/performance.png

One of k, P, M, K and the selection rows is doubled at a time, for the Gumbel solver with W in each
tier, the linear one and the default. Seconds of the whole command but for imports, the best of some
rounds; bytes of checkpoints read; the exponent is the slope of a line through the logarithms: 1
where twice as much costs twice as much.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import finish, processor
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.commands.select import run_select
from sewa_cli.config import Config
from sewa_cli.extensions import load_settings
from sewa_cli.task import Task, make_task

OUTPUTS = 10


@dataclass(frozen=True)
class Point:
    k: int = 100
    width: int = 400
    M: int = 2
    K: int = 10
    rows: int = 500

    @property
    def P(self) -> int:
        return (self.width + OUTPUTS) * (self.width + 1)

    def of(self, letter: str) -> int:
        return int(getattr(self, letter))


BASE = Point()
SWEEPS: dict[str, list[Point]] = {
    "k": [replace(BASE, k=k) for k in (50, 100, 200, 400)],
    "P": [replace(BASE, width=width) for width in (200, 283, 400, 566, 800)],
    "M": [replace(BASE, M=M) for M in (1, 2, 4, 8)],
    "K": [replace(BASE, K=K) for K in (5, 10, 20, 40)],
    "rows": [replace(BASE, rows=rows) for rows in (250, 500, 1000, 2000)],
}
WAYS: dict[str, dict[str, Any]] = {
    "gumbel, memory": {"solver": "gumbel", "tier": "memory"},
    "gumbel, bf16": {"solver": "gumbel", "tier": "bf16"},
    "gumbel, files": {"solver": "gumbel", "tier": "files"},
    "linear": {"solver": "linear"},
    "the default": {"K": "auto"},
}
GUMBEL_ONLY = {"M"}  # no other solver has it
BUDGETED = {"K"}  # the default has none


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, OUTPUTS))


@cache
def task_of(width: int, rows: int) -> Task:
    """Labels that the checkpoints, which scatter around one network, nearly know."""
    torch.manual_seed(0)
    centre, x = network(width), torch.randn(rows, width)
    with torch.no_grad():
        y = centre(x) + 0.1 * torch.randn(rows, OUTPUTS)
    batches = list(zip(torch.split(x, 250), torch.split(y, 250), strict=True))
    functions = {
        "build_model": lambda: network(width),
        "loss": lambda outputs, batch: F.mse_loss(outputs, batch[1]),
        "selection_data": lambda: batches,
    }
    return make_task(functions, source="benchmarks/growth.py", args={})


class Runs:
    """Folders of checkpoints, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, k: int, width: int) -> Path:
        folder = self._folder / f"{k}-{width}"
        if not folder.exists():
            folder.mkdir()
            torch.manual_seed(0)
            model = network(width)
            for step in range(k):
                state = {n: t + 0.01 * torch.randn_like(t) for n, t in model.state_dict().items()}
                save_file(state, folder / f"step-{step}.safetensors")
        return folder


def config_of(point: Point, way: Mapping[str, Any], folder: Path, iterations: int) -> Config:
    gumbel = {"iterations": iterations, "samples": point.M}
    flags = {"checkpoints": (folder,), "K": point.K, "device": "cpu", "gumbel": gumbel, **way}
    return load_settings(None, flags)


def measure(
    point: Point, way: Mapping[str, Any], runs: Runs, iterations: int, rounds: int
) -> dict[str, float]:
    task = task_of(point.width, point.rows)
    config = config_of(point, way, runs.of(point.k, point.width), iterations)
    costs = [run_select(config, task, write=False).report.cost for _ in range(rounds)]
    seconds = min(cost.seconds.total for cost in costs)
    return {"seconds": seconds, "bytes": costs[0].bytes_read}


def exponent(xs: list[int], ys: list[float]) -> float:
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def summed_up(letter: str, way: str, points: list[tuple[int, dict[str, float]]]) -> dict[str, str]:
    xs = [x for x, _ in points]
    seconds, read = ([cost[what] for _, cost in points] for what in ("seconds", "bytes"))
    return {
        "grows": f"{letter}: {xs[0]:,} … {xs[-1]:,}",
        "way": way,
        "seconds": f"{seconds[0]:.2f} … {seconds[-1]:.2f}",
        "exponent": f"{exponent(xs, seconds):.2f}",
        "MB read": f"{read[0] / 1e6:.0f} … {read[-1] / 1e6:.0f}",
        "exponent of bytes": f"{exponent(xs, read):.2f}",
    }


def draw(found: Mapping[tuple[str, str], list[tuple[int, dict[str, float]]]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, len(SWEEPS), sharey="row")
    styles = dict(zip(WAYS, ("o-", "s--", "^:", "d-.", "*-"), strict=True))
    for column, letter in enumerate(SWEEPS):
        for row, what in enumerate(("seconds", "bytes")):
            for way in WAYS:
                points = found.get((letter, way), [])
                axes[row, column].plot(
                    [x for x, _ in points],
                    [cost[what] / (1e6 if what == "bytes" else 1) for _, cost in points],
                    styles[way],
                    label=way,
                    color="black" if way != "the default" else "0.5",
                    markersize=4,
                    lw=1,
                )
            axes[row, column].set(xscale="log", yscale="log")
        ticks = [point.of(letter) for point in SWEEPS[letter]]
        for row in (0, 1):
            labels = [f"{x:,}" if x < 10_000 else f"{x / 1000:,.0f}k" for x in ticks]
            axes[row, column].set_xticks(ticks, labels, fontsize=8)
            axes[row, column].set_xticks([], minor=True)
        axes[1, column].set_xlabel(letter)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("MB read")
    axes[0, 2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--iterations", type=int, default=20, help="of the Gumbel solver")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{processor()}, {torch.get_num_threads()} threads, load before {load:.1f}\n", flush=True)
    found: dict[tuple[str, str], list[tuple[int, dict[str, float]]]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(Path(temporary))
        measure(BASE, WAYS["linear"], runs, 1, 1)  # what is imported is paid for here
        for letter in given.only:
            for way, settings in WAYS.items():
                if letter in GUMBEL_ONLY and not way.startswith("gumbel"):
                    continue
                if letter in BUDGETED and way == "the default":
                    continue
                points = [
                    (
                        point.of(letter),
                        measure(point, settings, runs, given.iterations, given.rounds),
                    )
                    for point in SWEEPS[letter]
                ]
                found[letter, way] = points
                rows.append(summed_up(letter, way, points))
    finish("growth", rows, given.json)
    if given.plot:
        draw(found, given.plot)


if __name__ == "__main__":
    main()
