"""Flags that several commands share, and what they do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sewa_cli.errors import ConfigError

if TYPE_CHECKING:
    from sewa_cli.config import Config
    from sewa_cli.task import Task

Checkpoints = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="CKPTS",
        help="A run's folder, checkpoints, or - for paths on standard input.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Default: sewa.yaml here, if there is one.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any key: --set gumbel.lr=0.1"),
]
TaskSpec = Annotated[
    str | None, typer.Option(help="The task: a .py file, huggingface, classification, or a module.")
]
# numbers arrive as text, so that the config tells all faults together and in the same words
Budget = Annotated[
    str | None,
    typer.Option("--K", "-K", metavar="N", help="How many checkpoints to average, or auto."),
]
Solver = Annotated[str | None, typer.Option(metavar="NAME", help="gumbel or linear.")]
Last = Annotated[str | None, typer.Option(metavar="N", help="Only the last N take part.")]
Every = Annotated[
    str | None, typer.Option(metavar="N", help="Only every N-th, counted back from the newest.")
]
FromStep = Annotated[str | None, typer.Option(metavar="STEP", help="No checkpoint before this.")]
ToStep = Annotated[str | None, typer.Option(metavar="STEP", help="No checkpoint after this.")]
Nonfinite = Annotated[
    str | None,
    typer.Option(metavar="skip|error", help="A checkpoint with NaN or Inf: skip or stop."),
]
StateKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Where PyTorch files have the weights, if it is not clear."),
]
Lora = Annotated[
    str | None,
    typer.Option(metavar="factors|merged", help="Average A and B of adapters, or their products."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps ...")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Cap on what sewa allocates: 8GiB, 500MB.")
]
ShardSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Split an output larger than this into a set: 5GB, 2GiB."),
]
Seed = Annotated[str | None, typer.Option(metavar="N", help="Same seed, same bytes.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite existing outputs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More on stderr, full tracebacks.")]


Format = Annotated[
    str, typer.Option("--format", metavar="NAME", help="table, markdown, csv, jsonl or json.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf")]
MethodsFrom = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A Python file with methods of your own.")
]


def load(config: Path | None, sets: list[str] | None, **flags: Any) -> Config:
    from sewa_cli.config import find_config, load_config

    if not flags.get("checkpoints"):
        flags["checkpoints"] = None  # typer gives an empty list
    return load_config(find_config(config), flags, sets or ())


def load_user_task(settings: Config, say: Callable[[str], None]) -> Task:
    from sewa_cli.rng import seeded
    from sewa_cli.task import load_task

    if settings.task is None:
        raise ConfigError("no task: give --task, or `task:` in sewa.yaml; `sewa init` writes both")
    with seeded(settings.seed):  # a task may shuffle while it is imported
        loaded = load_task(settings.task, settings.args)
    for line in (f"task {loaded.source}", *loaded.notes):
        say(line)
    return loaded


def refuse_plot(plot: Path | None, force: bool) -> None:
    """Before any work: a picture that could not be drawn or written in the end."""
    if plot is not None:
        from sewa_cli.output.atomic import check_free
        from sewa_cli.present.plots import check_plot

        check_plot(plot)
        check_free(plot, force)


def inputs_of(config: Path | None, settings: Config) -> list[Path]:
    """Files a command has read that are neither task nor checkpoints: never to be overwritten."""
    from sewa_cli.config import find_config

    return [path for path in (find_config(config), settings.compare.methods_from) if path]
