"""`sewa --help` against a bare Typer script's: `python benchmarks/startup.py`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import as_installed, finish, race

BARE = """
import typer
app = typer.Typer()
@app.command()
def one(name: str = "x") -> None:
    "One."
@app.command()
def two(name: str = "x") -> None:
    "Two."
app()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "bare Typer --help": [sys.executable, str(script), "--help"],
            "sewa --help": [sys.executable, "-m", "sewa_cli", "--help"],
            "sewa select --help": [sys.executable, "-m", "sewa_cli", "select", "--help"],
        }
        best = race(
            {
                name: lambda c=command: subprocess.run(  # type: ignore[misc]
                    c, check=True, capture_output=True, env=as_installed()
                )
                for name, command in commands.items()
            },
            rounds=15,
        )
    rows = [
        {"command": name, "ms": 1e3 * t, "/ bare Typer": t / best["bare Typer --help"]}
        for name, t in best.items()
    ]
    finish("startup", rows, given.json)


if __name__ == "__main__":
    main()
