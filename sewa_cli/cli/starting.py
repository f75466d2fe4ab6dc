"""`sewa init` and `sewa demo`: for those who begin."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Annotated

import typer

from sewa_cli.cli.options import Force, Quiet, Verbose
from sewa_cli.errors import ConfigError


def init(
    folder: Annotated[
        Path, typer.Argument(help="Where to; the working directory by default.")
    ] = Path(),
    task: Annotated[
        str | None, typer.Option(help="huggingface or classification: ready-made, no task.py.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a commented sewa.yaml and task.py to start from."""
    from sewa_cli.cli.main import stdout_for_data
    from sewa_cli.config import READY_MADE
    from sewa_cli.templates import write_template

    if task is not None and task not in READY_MADE:
        raise ConfigError(f"--task: no ready-made {task!r}; there are {', '.join(READY_MADE)}")
    with stdout_for_data() as stdout:
        for path in write_template(task or "init", folder, force):
            stdout.write(f"{path}\n".encode())


def demo(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A new folder.")] = Path(
        "sewa-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the training run and the solver.")] = 0,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a small network on real digits, choose 10 of its 100 checkpoints, show the gain."""
    from sewa_cli.cli.main import stdout_for_data

    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.cli.summary import summarise
        from sewa_cli.demo import run_demo

        with Talk(quiet, verbose) as talk:
            selection = run_demo(folder, seed, talk, force=force)
        summarise(talk, selection.report)
        stdout.write("".join(f"{path}\n" for path in selection.paths).encode())
    sewa = _called_from(folder)
    talk.say(
        f"\ntry next:\n  cd {quote(str(folder))}\n  {sewa} select ckpts/ --K 5\n"
        f"  {sewa} select ckpts/ --K 10 --json | jq .average\n"
        f"  {sewa} select ckpts/ --K 10 --last 50 -o last50.safetensors"
    )


def _called_from(folder: Path) -> str:
    """How to call this `sewa` again, in that folder."""
    if which("sewa"):
        return "sewa"
    # a virtual environment that is not activated
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{_shorter(sys.executable, folder)} -m sewa_cli"
    return _shorter(sys.argv[0], folder)


def _shorter(program: str, folder: Path) -> str:
    # its own name is not resolved: an environment's python is a link to another's
    full = Path(program).parent.resolve() / Path(program).name
    return quote(min(os.path.relpath(full, folder.resolve()), str(full), key=len))
