"""Seconds and passes of `sewa select` by several versions of sewa, taking turns.

    git worktree add /tmp/before 62954f7
    python benchmarks/versions.py sewa-demo --trees before=/tmp/before now=.

`sewa-demo` is a folder with a sewa.yaml. Each command is a process with one thread. Its seconds are
the processor's, the least of the rounds, as they do not depend on who else is at work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from common import finish

COMMANDS = {
    "default": ("--K", "auto"),
    "`--K 10`": ("--K", "10"),
    "`--K 10 --solver linear`": ("--K", "10", "--solver", "linear"),
}


def run(tree: Path, folder: Path, options: list[str]) -> tuple[float, float]:
    """Return seconds of the processor, and forward passes with the batches they are counted in."""
    with tempfile.TemporaryDirectory() as temporary:
        line = [sys.executable, "-m", "sewa_cli", "select", "--json", "--quiet", "--device", "cpu"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            [*line, *options, "-o", str(Path(temporary, "averaged"))],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, json.loads(ended.stdout)["cost"]["forward_passes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trees", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, default=1, help="of the selection data, in a pass")
    parser.add_argument("--options", nargs="*", default=[], help="for every command, without --")
    parser.add_argument("--json")
    asked = parser.parse_args()
    trees = {name: Path(folder) for name, _, folder in (one.partition("=") for one in asked.trees)}
    options = [f"--{one}" for one in asked.options]
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for _ in range(asked.rounds):
        for command, name in product(COMMANDS, trees):
            seconds, passes = run(trees[name], asked.folder, [*COMMANDS[command], *options])
            least = min(seconds, found.get((command, name), (seconds, 0.0))[0])
            found[command, name] = least, passes / asked.batches
    rows: list[dict[str, object]] = []
    for command in COMMANDS:
        row: dict[str, object] = {"command": command}
        for name in trees:
            seconds, passes = found[command, name]
            row |= {f"{name}, s": seconds, f"{name}, passes": passes}
        rows.append(row)
    finish("versions", rows, asked.json)


if __name__ == "__main__":
    main()
