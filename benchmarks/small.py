"""`sewa select` on the demo against a script with the same imports that evaluates all checkpoints.

    python benchmarks/small.py

The script evaluates each of the 100 checkpoints once on the selection data, which is the least
that a choice by the loss can do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import as_installed, finish, race

PLAIN = """
import sewa_cli.cli.app
import sewa_cli.commands.select
import sewa_cli.report.select
from sewa_cli import solvers
solvers.find("aggregate"), solvers.find("gumbel")
from pathlib import Path
import torch
from safetensors.torch import load_file
import task
model, batches = task.build_model(), list(task.selection_data())
for path in sorted(Path("ckpts").iterdir()):
    model.load_state_dict(load_file(path))
    model.eval()
    with torch.inference_mode():
        sum(float(task.loss(model(batch[0]), batch)) for batch in batches)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sewa = [sys.executable, "-m", "sewa_cli"]
        home = Path(folder) / "demo"
        run = {"check": True, "capture_output": True, "env": as_installed()}
        subprocess.run([*sewa, "demo", str(home)], **run)  # type: ignore[call-overload]
        (home / "plain.py").write_text(PLAIN)
        write = ["-o", "out.safetensors", "--force"]
        commands = {
            "the script": [sys.executable, "plain.py"],
            "sewa select": [*sewa, "select", *write],
            "sewa select --K 10": [*sewa, "select", "--K", "10", *write],
        }
        best = race(
            {
                name: lambda c=command: subprocess.run(c, cwd=home, **run)  # type: ignore[misc]
                for name, command in commands.items()
            },
            rounds=5,
        )
    rows = [
        {"command": name, "s": t, "/ the script": t / best["the script"]}
        for name, t in best.items()
    ]
    finish("small", rows, None)


if __name__ == "__main__":
    main()
