"""The whole of `sewa select`, in parts, as k and P grow: `python benchmarks/select_command.py`.

Checkpoints of a small network at random distances; the network's own work is kept small, so that
what is ours shows. `--plot FILE` draws how the cost grows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import finish, timed
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli import select
from sewa_cli.objective.objective import Objective
from sewa_cli.trajectory import Trajectory

SWEEP = [(k, 400) for k in (25, 50, 100, 200, 400)]  # P = 320,000
SWEEP += [(100, width) for width in (100, 200, 566, 800)]  # P = 20,000 … 1,280,000


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def measure(k: int, width: int, iterations: int, rounds: int) -> dict[str, float]:
    """Best of several rounds, in seconds."""
    torch.manual_seed(0)
    model = network(width)
    x = torch.randn(32, width)
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in range(k):
            state = {n: t + 0.01 * torch.randn_like(t) for n, t in model.state_dict().items()}
            save_file(state, Path(folder) / f"step-{step}.safetensors")
        for turn in range(rounds):
            spent = dict.fromkeys(("mixing", "model"), 0.0)
            with (
                timed(Trajectory, "mix", spent, "mixing"),
                timed(Trajectory, "pull_back", spent, "mixing"),
                timed(Objective, "gradient", spent, "model"),
            ):
                result = select(
                    folder,
                    model=model,
                    loss=lambda outputs, batch: F.mse_loss(outputs, batch[1]),
                    selection_data=[(x, torch.tanh(x))],
                    K=10,
                    output=Path(folder) / f"out{turn}",
                    device="cpu",
                    gumbel={"iterations": iterations},
                )
            seconds = result.report.cost.seconds
            found = {
                "reading": seconds.read,
                **spent,
                "rest of learning": max(0.0, seconds.learn - sum(spent.values())),
                "writing": seconds.write,
                "all": seconds.total,
            }
            best = {name: min(t, best.get(name, t)) for name, t in found.items()}
    return best


def draw(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, key, fixed in ((left, "k", 400), (right, "P", 100)):
        chosen = [row for row in rows if (row["width"] == fixed if key == "k" else row["k"] == 100)]
        chosen.sort(key=lambda row: row[key])
        for part, style in (("mixing", "o-"), ("reading", "s--"), ("writing", "^:")):
            axes.plot(
                [row[key] for row in chosen],
                [row[part] for row in chosen],
                style,
                label=part,
                color="black",
                markersize=4,
            )
        first, last = chosen[0], chosen[-1]
        ends = [first[key], last[key]]
        slope = [last["mixing"] * x / last[key] for x in ends]
        axes.plot(ends, slope, color="0.7", lw=5, zorder=0, label="linear, for comparison")
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [row[key] for row in chosen]
        axes.set_xticks(ticks, [f"{x:,}" if x < 10_000 else f"{x / 1000:,.0f}k" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("checkpoints k (P = 320,800)" if key == "k" else "parameters P (k = 100)")
        axes.set_ylabel("ms")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    for k, width in SWEEP:
        best = measure(k, width, given.iterations, given.rounds)
        P = sum(p.numel() for p in network(width).parameters())
        rows.append({"k": k, "P": P, "width": width, **{name: 1e3 * t for name, t in best.items()}})
    if given.plot:
        draw(rows, given.plot)
    shown = [{name: cell for name, cell in row.items() if name != "width"} for row in rows]
    finish("select", shown, given.json)


if __name__ == "__main__":
    main()
