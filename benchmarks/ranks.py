"""Memory, bytes and seconds of several ranks and of one: the tables of docs/how-to/scale.md.

    python benchmarks/ranks.py [--ranks 1 2] [--rounds 3] [--cases passes W bf16]

Selections in which passes through the model take the time (many rows, few checkpoints of a small
model), and in which W does (a few rows, hundreds of checkpoints), in float32 and as bf16
differences; *share* is what one rank spends on just that. One thread a rank; ranks take turns, and
the best of each counts. *Side by side* is what the host allows: the command on one rank, run twice
at once, half of its time by the time alone; ranks that share the work out and wait for nobody would
take that. Memory is what a rank holds at most above the same command with next to no weights: W,
the model, and the vectors of both; of `bf16` it is not asked, where most is the page cache's, of
mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from common import processor, timed
from safetensors.torch import save_file
from torch import nn

TASK = """
import torch
from torch import nn
from torch.nn import functional as F

def build_model(width, layers):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 8))

def data(rows, width, batches, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches, rows, width, generator=generator)
    return [(part, (part[:, 0] > 0).long()) for part in x]

def selection_data(rows, width, batches):
    return data(rows, width, batches, 0)

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])
"""


class Case(NamedTuple):
    width: int
    layers: int
    rows: int  # of a batch
    batches: int
    k: int
    iterations: int
    tier: str = "memory"


CASES = {
    "passes": Case(256, 6, 20_000, 2, 4, 6),
    "W": Case(1024, 2, 8, 1, 600, 100),
    "bf16": Case(1024, 2, 8, 1, 600, 25, "bf16"),
}
NOTHING = Case(16, 2, 8, 1, 4, 2)


def prepare(folder: Path, case: Case) -> None:
    width, layers, rows, batches, k, iterations, tier = case
    (folder / "ckpts").mkdir(parents=True)
    (folder / "task.py").write_text(TASK)
    (folder / "sewa.yaml").write_text(
        f"task: ./task.py\nargs: {{width: {width}, layers: {layers}, rows: {rows}, batches: "
        f"{batches}}}\ncheckpoints: ckpts\nK: 2\nsolver: gumbel\ndevice: cpu\nmemory: 8GiB\n"
        f"tier: {tier}\ngumbel: {{iterations: {iterations}}}\n"
    )
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(width, 8))
    for step in range(k):
        state = {n: t + 0.01 * torch.randn_like(t) for n, t in model.state_dict().items()}
        save_file(state, folder / f"ckpts/step-{step}.safetensors")


class Found(NamedTuple):
    seconds: float  # of the selection by the clock, imports apart
    read: int  # bytes, by the rank with the most
    held: int


def start(folder: Path, ranks: int, output: str = "out") -> subprocess.Popen[str]:
    sewa = [sys.executable, "-m", "sewa_cli"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node"]
    command = sewa if ranks == 1 else [*torchrun, str(ranks), *sewa]
    return subprocess.Popen(
        [*command, "select", "-v", "--force", "-o", f"{output}.safetensors"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end(running: subprocess.Popen[str], folder: Path, output: str = "out") -> Found:
    _, told = running.communicate()
    if running.returncode:
        raise SystemExit(told)
    cost = json.loads((folder / f"{output}.report.json").read_text())["cost"]
    found = re.findall(r"^rank \d+: (\d+) bytes read, (\d+) held at most$", told, re.M)
    pairs = [(int(read), int(held)) for read, held in found]
    pairs = pairs or [(cost["bytes_read"], cost["peak_memory_bytes"])]
    read, held = (max(each) for each in zip(*pairs, strict=True))
    return Found(cost["seconds"]["total"], read, held)


def run(folder: Path, ranks: int) -> Found:
    return end(start(folder, ranks), folder)


def side_by_side(folder: Path) -> float:
    """Seconds of the command on one rank, of two at once the slower."""
    both = {output: start(folder, 1, output) for output in ("left", "right")}
    return max(end(running, folder, output).seconds for output, running in both.items())


def shares(folder: Path) -> dict[str, float]:
    """Return the shares of one rank's time spent on passes and on W, measured in this process."""
    from sewa_cli.commands.select import run_select
    from sewa_cli.extensions import load_settings
    from sewa_cli.objective.objective import Objective
    from sewa_cli.placing import Setup
    from sewa_cli.task import load_task
    from sewa_cli.trajectory import Trajectory

    torch.set_num_threads(1)
    config = load_settings(folder / "sewa.yaml")
    task = load_task(str(folder / "task.py"), config.args)
    spent = {"passes": 0.0, "W": 0.0}
    with ExitStack() as stack:
        running: list[str] = []
        for owner, name, part in (
            (Objective, "gradient", "passes"),
            (Objective, "mean_loss", "passes"),
            (Trajectory, "mix", "W"),
            (Trajectory, "pull_back", "W"),
            (Setup, "place", "W"),
        ):
            stack.enter_context(timed(owner, name, spent, part, running))
        total = run_select(config, task, write=False).report.cost.seconds.total
    return {part: seconds / total for part, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} cores, one thread a rank\n")
    head = "the time is in | share | ranks | seconds | of one | side by side"
    print(f"| {head} | bytes read | of one | held | of one |")
    print("|---" * 10 + "|")
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place, "nothing"), NOTHING)
        floor = {ranks: run(Path(place, "nothing"), ranks).held for ranks in options.ranks}
        for name in options.cases:
            folder = Path(place, name)
            prepare(folder, CASES[name])
            share = shares(folder)["passes" if name == "passes" else "W"]
            runs: dict[int, list[Found]] = {ranks: [] for ranks in options.ranks}
            both: list[float] = []
            for _ in range(options.rounds):
                for ranks, own in runs.items():
                    own.append(run(folder, ranks))
                both.append(side_by_side(folder))
            alone = min(found.seconds for found in runs[options.ranks[0]])
            first: list[float] = []
            for ranks, own in runs.items():
                numbers = [
                    min(found.seconds for found in own),
                    own[0].read / 2**20,
                    (min(found.held for found in own) - floor[ranks]) / 2**20,
                ]
                first = first or numbers
                seconds, read, held = (
                    f"{x:.1f}{unit} | {x / one:.2f}"
                    for x, one, unit in zip(numbers, first, ("", " MiB", " MiB"), strict=True)
                )
                least = f"{min(both) / 2 / alone:.2f}" if ranks == 2 else ""
                held = held if CASES[name].tier == "memory" else " | "
                print(
                    f"| {name} | {share:.0%} | {ranks} | {seconds} | {least} | {read} | {held} |",
                    flush=True,
                )
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
