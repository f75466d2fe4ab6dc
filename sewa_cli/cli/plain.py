"""`sewa average` and `sewa evaluate`: no learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sewa_cli.cli.options import (
    Budget,
    Checkpoints,
    ConfigFile,
    Device,
    Every,
    Force,
    Format,
    FromStep,
    Last,
    Lora,
    MethodsFrom,
    Quiet,
    Seed,
    Sets,
    ShardSize,
    StateKey,
    TaskSpec,
    ToStep,
    Verbose,
    inputs_of,
    load,
    load_user_task,
)
from sewa_cli.errors import ConfigError


def average(
    ckpts: Checkpoints = None,
    method: Annotated[
        str, typer.Option(help="`sewa methods` lists them; options: ema:decay=0.5")
    ] = "uniform",
    K: Budget = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="A,B,..", help="One for each file, in the order given; sum 1."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="The averaged file; - for standard output.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report for `sewa apply`; it hashes the sources.")
    ] = None,
    config: ConfigFile = None,
    set_: Sets = None,
    lora: Lora = None,
    state_key: StateKey = None,
    force: Force = False,
    last: Last = None,
    every: Every = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    output_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, float64.")
    ] = None,
    shard_size: ShardSize = None,
    methods_from: MethodsFrom = None,
    seed: Seed = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Average checkpoints without a model or data, by a method or by explicit weights.

    Prints the paths that went into it.
    """
    from sewa_cli.cli.main import stdout_for_data, without_blas

    without_blas()
    numbers = _numbers(weights) if weights is not None else None
    if numbers is not None and (method != "uniform" or any((K, last, every, from_step, to_step))):
        raise ConfigError(
            "--weights names every file's share; --method, --K and --last do not apply"
        )
    settings = load(
        config,
        set_,
        checkpoints=ckpts,
        lora=lora,
        state_key=state_key,
        K=K,
        output=output,
        report=report,
        last=last,
        every=every,
        from_step=from_step,
        to_step=to_step,
        output_dtype=output_dtype,
        shard_size=shard_size,
        seed=seed,
        **{"compare.methods_from": methods_from},
    )
    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.commands.average import run_average
        from sewa_cli.methods.proposing import register_methods
        from sewa_cli.present.card import describe_lora

        with Talk(quiet, verbose) as talk:
            register_methods(settings, talk, wanted=method)
            average, written = run_average(
                settings,
                method,
                numbers,
                force=force,
                stdout=stdout,
                protected=inputs_of(config, settings),
                listener=talk,
            )
        if written != "-":
            stdout.write("".join(f"{c.path}\n" for c in average.sources).encode())
            stdout.flush()
            if average.lora and average.lora.mode == "merged":
                talk.say(describe_lora(average.lora))
            talk.say(f"wrote {written}")


def evaluate(
    ckpts: Checkpoints = None,
    config: ConfigFile = None,
    set_: Sets = None,
    state_key: StateKey = None,
    task: TaskSpec = None,
    form: Format = "table",
    device: Device = None,
    seed: Seed = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Loss and metrics of checkpoints or averaged files, each as it is."""
    from sewa_cli.cli.main import stdout_for_data
    from sewa_cli.present.tables import Cell, check_format, render

    check_format(form)
    settings = load(
        config, set_, checkpoints=ckpts, state_key=state_key, task=task, device=device, seed=seed
    )
    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.commands.evaluate import run_evaluate

        with Talk(quiet, verbose) as talk:
            found = run_evaluate(settings, load_user_task(settings, talk.say), talk)
        rows: list[dict[str, Cell]] = []
        for file in found.files:
            row: dict[str, Cell] = {"path": file.path, "step": file.step}
            row["selection_loss"] = file.scores.selection_loss
            if found.heldout_rows is not None:
                row["heldout_loss"] = file.scores.heldout_loss
            rows.append({**row, **(file.scores.metrics or {})})
        text = json.dumps(rows, indent=2) + "\n" if form == "json" else render(rows, form)
        stdout.write(text.encode())


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights: must be numbers with commas between, found {text!r}"
        ) from None
