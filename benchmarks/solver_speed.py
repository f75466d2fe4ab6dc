"""The cost of choosing: `python benchmarks/solver_speed.py`, tables in Markdown.

200 checkpoints of a network of 10⁶ parameters, 1,000 rows to select by, all files in the page
cache. First `sewa select`: bytes of checkpoints read and seconds by stage, where W is streamed from
the files because memory is short, and where it is held. Then `sewa compare --K 5,10,20,50`, where
one cache of outputs serves every K. Last the default, against the linear solver's mask, with what
its cross-validation takes. Contestants take turns; the best time of each counts. On a busy
machine trust the CPU's seconds (of all threads together) more than the clock's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import finish, timed
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.commands.compare import run_compare
from sewa_cli.commands.select import run_select
from sewa_cli.config import Config
from sewa_cli.objective.objective import Objective
from sewa_cli.report.shared import Cost
from sewa_cli.session.extensions import load_settings
from sewa_cli.solvers import aggregate, linear
from sewa_cli.solvers.outputs import survey
from sewa_cli.task import Task, make_task
from sewa_cli.trajectory import Trajectory

K = 10
BUDGETS = (5, 10, 20, 50)
STAGES: list[tuple[Any, str, str]] = [  # of one within another, the outer counts
    (Trajectory, "mix", "products with W"),
    (Trajectory, "pull_back", "products with W"),
    (Objective, "gradient", "forward and backward"),
    (survey, "predict", "surveying"),
    (aggregate, "estimate", "cross-validation"),
    (linear, "best_mask", "solving"),
]


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def make_run(folder: Path, k: int, width: int, rows: int, batch: int) -> Task:
    """Checkpoints scattered around a network that knows the labels."""
    torch.manual_seed(0)
    model = network(width)
    for step in range(k):
        state = {n: t + 0.02 * torch.randn_like(t) for n, t in model.state_dict().items()}
        save_file(state, folder / f"step-{step}.safetensors")
    x = torch.randn(2 * rows, 64)
    with torch.no_grad():
        y = model(x).argmax(1)
    batches = list(zip(torch.split(x, batch), torch.split(y, batch), strict=True))
    half = len(batches) // 2
    functions = {
        "build_model": lambda: network(width),
        "loss": lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        "selection_data": lambda: batches[:half],
        "heldout_data": lambda: batches[half:],
    }
    return make_task(functions, source="benchmarks/solver_speed.py", args={})


def measure(work: Callable[[], Cost]) -> dict[str, float]:
    """Bytes read, passes, and seconds by stage."""
    spent = dict.fromkeys(dict.fromkeys(stage for *_, stage in STAGES), 0.0)
    running: list[str] = []
    with ExitStack() as stack:
        for owner, name, stage in STAGES:
            stack.enter_context(timed(owner, name, spent, stage, running))
        began = time.process_time()
        cost = work()
        cpu = time.process_time() - began
    return {
        "bytes": cost.bytes_read,
        "forward-equivalents": cost.forward_passes + 2 * cost.backward_passes,
        "cpu": cpu,
        "seconds": cost.seconds.total,
        **spent,
        "the rest": cost.seconds.total - sum(spent.values()),
    }


def race(
    contestants: Mapping[str, tuple[int, Callable[[], Cost]]],
) -> dict[str, dict[str, float]]:
    """name → (rounds, work): the turn of each that took the CPU least."""
    best: dict[str, dict[str, float]] = {}
    for turn in range(max(rounds for rounds, _ in contestants.values())):
        for name, (rounds, work) in contestants.items():
            if turn < rounds:
                found = measure(work)
                if name not in best or found["cpu"] < best[name]["cpu"]:
                    best[name] = found
    return best


def rows_of(best: Mapping[str, Mapping[str, float]]) -> list[dict[str, object]]:
    """Ratios are against the first."""
    first = next(iter(best.values()))
    rows = []
    for name, found in best.items():
        row: dict[str, object] = {
            "command": name,
            "GB read": found["bytes"] / 1e9,
            "fewer": f"{first['bytes'] / found['bytes']:.1f} ×",
            "forward-equivalents": int(found["forward-equivalents"]),
            "seconds": found["seconds"],
            "faster": f"{first['seconds'] / found['seconds']:.1f} ×",
            "CPU seconds": found["cpu"],
            "less": f"{first['cpu'] / found['cpu']:.1f} ×",
        }
        stages = list(found)[list(found).index("seconds") + 1 :]
        row["of which"] = ", ".join(
            f"{stage} {found[stage]:.2f}" for stage in stages if found[stage] >= 0.005
        )
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--width", type=int, default=964)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--iterations", type=int, default=100, help="of the Gumbel solver")
    parser.add_argument("--rounds", type=int, default=3, help="of all but Gumbel from files")
    parser.add_argument("--slow-rounds", type=int, default=1, help="of Gumbel from files")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", choices=("select", "compare", "default"))
    parser.add_argument("--json")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    P = sum(p.numel() for p in network(given.width).parameters())
    load = ", ".join(f"{minutes:.1f}" for minutes in os.getloadavg())
    print(
        f"k = {given.checkpoints}, P = {P:,}, {given.rows} rows in batches of {given.batch}, "
        f"{torch.get_num_threads()} threads; load of the machine before: {load}\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = make_run(folder, given.checkpoints, given.width, given.rows, given.batch)

        def config(**settings: Any) -> Config:
            gumbel = {"iterations": given.iterations}
            flags = {"checkpoints": (folder,), "K": K, "device": "cpu", "gumbel": gumbel}
            return load_settings(None, {**flags, **settings})

        def select(tier: str | None = None, **settings: Any) -> Cost:
            report = run_select(config(**settings), task, write=False).report
            if tier not in (None, report.placement.tier):
                raise ValueError(f"meant to hold W in {tier}, found {report.placement.tier}")
            return report.cost

        def compare(fast: bool = False, **settings: Any) -> Cost:
            asked = {"methods": ("sewa",), "K": budgets, "fast": fast}
            return run_compare(config(compare=asked, **settings), task).cost

        budgets = tuple(budget for budget in BUDGETS if given.checkpoints > budget)
        small = 64 * P  # bytes: a few rows of W
        large = (4 * given.checkpoints + 64) * P  # all of them
        tables = {
            "select": {
                "gumbel, W streamed": (
                    given.slow_rounds,
                    lambda: select("files", solver="gumbel", memory=small),
                ),
                "gumbel, W in memory": (
                    given.rounds,
                    lambda: select("memory", solver="gumbel", memory=large),
                ),
                "linear": (given.rounds, lambda: select(solver="linear")),
                "linear, same memory": (
                    given.rounds,
                    lambda: select(solver="linear", memory=small),
                ),
            },
            "compare": {
                "gumbel": (given.rounds, lambda: compare(solver="gumbel")),
                "`--fast`": (given.rounds, lambda: compare(fast=True)),
                "`--solver linear`": (given.rounds, lambda: compare(solver="linear")),
            },
            "default": {
                "linear, K=10": (given.rounds, lambda: select(solver="linear")),
                "the default": (given.rounds, lambda: select(K="auto")),
                "`--sparse`": (given.rounds, lambda: select(K="auto", sparse=True)),
            },
        }
        for name, contestants in tables.items():
            if given.only in (None, name):
                titled = {f"{name}: {who}": run for who, run in contestants.items()}
                path = given.json and f"{given.json}.{name}"
                finish(f"solver_speed {name}", rows_of(race(titled)), path)
                print()


if __name__ == "__main__":
    main()
