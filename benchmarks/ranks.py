"""What several ranks hold, read and take, beside one: the tables of docs/scale.md.

    python benchmarks/ranks.py [--ranks 1 2 4] [--rounds 2] [--plan]

Two selections, one in which passes through the model take the time, and one in which W does. One
thread a rank; ranks take turns, and the best of each counts. Memory is what a rank holds at most
above the same command with next to no weights: W, the model, and the vectors of both. `--plan`:
what each rank would hold and read of two large Llamas, by the forecast, from headers alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from common import processor
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
# width, layers, rows of a batch, batches, checkpoints, iterations
CASES = {
    "passes": (256, 6, 20_000, 2, 4, 40),
    "W": (512, 2, 8, 1, 600, 100),
    "nothing": (16, 2, 8, 1, 4, 2),
}


def prepare(folder: Path, name: str) -> None:
    width, layers, rows, batches, k, iterations = CASES[name]
    (folder / "ckpts").mkdir(parents=True)
    (folder / "task.py").write_text(TASK)
    (folder / "sewa.yaml").write_text(
        f"task: ./task.py\nargs: {{width: {width}, layers: {layers}, rows: {rows}, batches: "
        f"{batches}}}\ncheckpoints: ckpts\nK: 2\nsolver: gumbel\ndevice: cpu\nmemory: 4GiB\n"
        f"gumbel: {{iterations: {iterations}, samples: 1}}\n"
    )
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(width, 8))
    for step in range(k):
        state = {n: t + 0.01 * torch.randn_like(t) for n, t in model.state_dict().items()}
        save_file(state, folder / f"ckpts/step-{step}.safetensors")


class Found(NamedTuple):
    seconds: float  # of the selection by the clock, imports apart
    processor: float  # seconds of all processes together, with imports
    read: int  # bytes, by the rank with the most
    held: int


def run(folder: Path, ranks: int) -> Found:
    before = os.times()
    command = [sys.executable, "-m", "sewa_cli", "select", "-v", "--force", "-o", "out.safetensors"]
    ended = subprocess.run(
        [*command, "--ranks", str(ranks)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    cost = json.loads((folder / "out.report.json").read_text())["cost"]
    found = re.findall(r"^rank \d+: (\d+) bytes read, (\d+) held at most$", ended.stderr, re.M)
    pairs = [(int(read), int(held)) for read, held in found]
    pairs = pairs or [(cost["bytes_read"], cost["peak_memory_bytes"])]
    read, held = (max(each) for each in zip(*pairs, strict=True))
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return Found(cost["seconds"]["total"], used, read, held)


def plan() -> None:
    """7B × 20 on 8 ranks, 70B × 50 on 64, each with 72 GiB; seconds would be this machine's."""
    from forecast import LARGE, holes, language_task

    from sewa_cli.commands.forecast import run_forecast
    from sewa_cli.session.extensions import load_settings

    head = "model, checkpoints | ranks | solver | tier | a rank reads | a rank holds"
    print(f"| {head} | of that, the model |")
    print("|---" * 7 + "|")
    for name, checkpoints, ranks in (("7B", 20, 8), ("70B", 50, 64)):
        with tempfile.TemporaryDirectory() as folder:
            holes(Path(folder), checkpoints, **LARGE[name])
            flags = {"checkpoints": (Path(folder),), "device": "cpu", "memory": "72GiB"}
            task = language_task(300, 512, **LARGE[name])
            found = run_forecast(load_settings(None, flags), task, shapes_only=True, ranks=ranks)
        for one in (found, *found.alternatives):
            fits = "" if one.fits else " (does not fit)"
            print(
                f"| {name} × {checkpoints} | {ranks} | {one.solver} | {one.placement.tier}{fits} | "
                f"{one.bytes_read / 2**30:.0f} GiB | {one.peak_memory_bytes / 2**30:.1f} GiB | "
                f"{found.model_bytes / 2**30:.1f} GiB |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    if options.plan:
        plan()
        return
    print(f"{processor()}, {os.cpu_count()} cores, one thread a rank\n")
    head = "the time is in | ranks | seconds | of one | processor seconds of a rank | of one"
    print(f"| {head} | bytes read | of one | held | of one |")
    print("|---" * 10 + "|")
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in CASES}
        for name, folder in folders.items():
            prepare(folder, name)
        floor = {ranks: run(folders["nothing"], ranks) for ranks in options.ranks}
        for name in ("passes", "W"):
            turns = [ranks for _ in range(options.rounds) for ranks in options.ranks]
            runs = [(ranks, run(folders[name], ranks)) for ranks in turns]
            first: list[float] = []
            for ranks in options.ranks:
                own, least = [found for n, found in runs if n == ranks], floor[ranks]
                numbers = [
                    min(found.seconds for found in own),
                    (min(found.processor for found in own) - least.processor) / ranks,
                    own[0].read / 2**20,
                    (min(found.held for found in own) - least.held) / 2**20,
                ]
                first = first or numbers
                cells = [
                    f"{x:.1f}{unit} | {x / one:.2f}"
                    for x, one, unit in zip(numbers, first, ("", "", " MiB", " MiB"), strict=True)
                ]
                print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
