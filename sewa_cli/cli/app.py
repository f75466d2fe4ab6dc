"""The commands and their flags. Each imports what it needs when it runs: `--help` stays fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sewa_cli.cli.compare import compare, methods
from sewa_cli.cli.inspect import inspect
from sewa_cli.cli.options import (
    Budget,
    Checkpoints,
    ConfigFile,
    Device,
    Every,
    Force,
    FromStep,
    Last,
    Lora,
    Memory,
    Nonfinite,
    Plot,
    Quiet,
    Seed,
    Sets,
    ShardSize,
    Solver,
    StateKey,
    TaskSpec,
    ToStep,
    Verbose,
    inputs_of,
    load,
    load_user_task,
    refuse_plot,
)
from sewa_cli.cli.plain import average, evaluate
from sewa_cli.cli.starting import demo, init
from sewa_cli.errors import BaselineWins, CheckpointError, ConfigError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Learn which checkpoints of a training run to average.",
)


@app.callback(invoke_without_command=True)
def top(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        from sewa_cli import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def select(
    ckpts: Checkpoints = None,
    K: Budget = None,
    config: ConfigFile = None,
    set_: Sets = None,
    lora: Lora = None,
    state_key: StateKey = None,
    task: TaskSpec = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="The averaged file; - for standard output.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="The JSON report. Default: OUTPUT with .report.json")
    ] = None,
    force: Force = False,
    last: Last = None,
    every: Every = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    nonfinite: Nonfinite = None,
    solver: Solver = None,
    stable: Annotated[
        bool, typer.Option("--stable", help="Choose what most resamples of the data choose.")
    ] = False,
    guard: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Keep that share of the selection rows as held out."),
    ] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Write a simple average if it does better held out.")
    ] = False,
    iterations: Annotated[
        str | None, typer.Option(metavar="N", help="Of the solver. Default: 100")
    ] = None,
    bn: Annotated[
        str | None, typer.Option(metavar="auto|on|off", help="Recompute BatchNorm statistics.")
    ] = None,
    output_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, float64.")
    ] = None,
    shard_size: ShardSize = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 5 if a simple average does better held out.")
    ] = False,
    memory: Memory = None,
    device: Device = None,
    seed: Seed = None,
    plot: Plot = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it will read, hold and compute; no more.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report instead of the chosen paths.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Learn which K checkpoints to average; write the average and a report.

    Prints the chosen checkpoints' paths, one a line.
    """
    from sewa_cli.cli.main import stdout_for_data
    from sewa_cli.report.part import to_json

    settings = load(
        config,
        set_,
        checkpoints=ckpts,
        lora=lora,
        state_key=state_key,
        K=K,
        task=task,
        output=output,
        report=report,
        last=last,
        every=every,
        from_step=from_step,
        to_step=to_step,
        nonfinite=nonfinite,
        solver=solver,
        stable=stable or None,
        guard=guard,
        fallback=fallback or None,
        bn=bn,
        output_dtype=output_dtype,
        shard_size=shard_size,
        strict=strict or None,
        memory=memory,
        device=device,
        seed=seed,
        **{"gumbel.iterations": iterations, "linear.iterations": iterations},
    )
    if settings.output == "-" and as_json and not dry_run:
        raise ConfigError("--json and --output - both want standard output; use --report")
    refuse_plot(plot, force)

    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.cli.summary import summarise
        from sewa_cli.commands.forecast import run_forecast
        from sewa_cli.commands.select import run_select

        if dry_run:
            with Talk(quiet, verbose) as talk:
                forecast = run_forecast(settings, load_user_task(settings, talk.say), talk)
            found = forecast.model_dump(exclude={"placement"})
            found |= {f"tier {k}" if k == "reason" else k: v for k, v in forecast.placement}
            text = to_json(forecast) if as_json else "".join(_lines(found))
            stdout.write(text.encode())
            return

        with Talk(quiet, verbose) as talk:
            selection = run_select(
                settings,
                load_user_task(settings, talk.say),
                talk,
                force=force,
                stdout=stdout,
                protected=inputs_of(config, settings),
            )
        summarise(talk, selection.report)
        if plot is not None:
            from sewa_cli.present.plots import save_figure
            from sewa_cli.present.plots.select import plot_selection

            save_figure(plot_selection(selection.report), plot, force)
            talk.say(f"wrote {plot}")
        if as_json:
            stdout.write(to_json(selection.report).encode())
        elif settings.output != "-":
            stdout.write("".join(f"{path}\n" for path in selection.paths).encode())
    # a fallback has mended it
    if settings.strict and selection.report.beaten_by and selection.report.learned is None:
        best = selection.report.beaten_by[0]
        by = "" if best.by is None else f" by {best.by:.5g}"
        raise BaselineWins(f"--strict: `{best.name}` did better on held-out data{by}")


@app.command()
def validate(
    ckpts: Checkpoints = None,
    K: Budget = None,
    config: ConfigFile = None,
    set_: Sets = None,
    state_key: StateKey = None,
    task: TaskSpec = None,
    last: Last = None,
    every: Every = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check config, task and checkpoints, and run one batch. Nothing is learned or written."""
    from dataclasses import asdict

    from sewa_cli.cli.main import stdout_for_data

    settings = load(
        config,
        set_,
        checkpoints=ckpts,
        state_key=state_key,
        K=K,
        task=task,
        last=last,
        every=every,
        from_step=from_step,
        to_step=to_step,
        device=device,
    )
    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.commands.validate import run_validate

        with Talk(quiet, verbose) as talk:
            found = asdict(run_validate(settings, load_user_task(settings, talk.say), talk))
        if as_json:
            text = json.dumps(found, indent=2) + "\n"
        else:
            text = "".join(_lines(found))
        stdout.write(text.encode())
        talk.say("all fits together")


@app.command()
def apply(
    report: Annotated[Path, typer.Argument(help="A report of `sewa select`.")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="A file, or - for standard output.")
    ],
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build a report's averaged file again, byte for byte, without the task.

    Refuses when a checkpoint's size or SHA-256 is not what the report says.
    """
    from pydantic import ValidationError

    from sewa_cli.report.recipe import Rebuildable

    try:
        past = Rebuildable.model_validate_json(report.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{report}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(f"{report}: not a report of sewa: {where}: {first['msg']}") from error

    from sewa_cli.cli.console import Talk
    from sewa_cli.cli.main import stdout_for_data, without_blas

    without_blas()
    from sewa_cli.commands.apply import run_apply

    with stdout_for_data() as stdout, Talk(quiet, verbose) as talk:
        target = stdout if output == "-" else Path(output)
        written = run_apply(past, report, target, force=force)
        if output != "-":
            talk.say(f"wrote {written}")


@app.command()
def schema(
    of: Annotated[str, typer.Argument(help="select, compare, windows or inspect")] = "select",
) -> None:
    """Print the JSON Schema of the report."""
    from pydantic import BaseModel

    from sewa_cli.cli.main import stdout_for_data
    from sewa_cli.report.compare import Comparison
    from sewa_cli.report.part import schema as report_schema
    from sewa_cli.report.select import Report
    from sewa_cli.report.windows import Windows

    reports: dict[str, type[BaseModel]] = {
        "select": Report,
        "compare": Comparison,
        "windows": Windows,
    }
    with stdout_for_data() as stdout:
        if of == "inspect":
            from sewa_cli.commands.inspect import Inspection

            reports[of] = Inspection
        if of not in reports:
            known = ", ".join([*reports, "inspect"])
            raise ConfigError(f"there is no report of {of!r}; there are {known}")
        stdout.write((json.dumps(report_schema(reports[of]), indent=2) + "\n").encode())


for command in (init, demo, compare, methods, average, evaluate, inspect):
    app.command()(command)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    from sewa_cli.text import size

    width = max(len(key) for key in found)
    for key, value in found.items():
        shown = size(value) if key.endswith(("_bytes", "bytes_read")) else _plain(value)
        yield f"{key.replace('_', ' '):>{width}}  {shown}\n"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
