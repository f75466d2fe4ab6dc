"""`sewa compare` and `sewa methods`."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    Memory,
    MethodsFrom,
    Nonfinite,
    Plot,
    Quiet,
    Seed,
    Sets,
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
from sewa_cli.errors import ConfigError

if TYPE_CHECKING:
    from sewa_cli.present.tables import Cell
    from sewa_cli.report.compare import Comparison


def compare(
    ckpts: Checkpoints = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="`sewa methods` lists them; options: ema:decay=0.5"),
    ] = None,
    K: Budget = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Methods search by predicted losses, over one cache."),
    ] = False,
    solver: Solver = None,
    windows: Annotated[
        str | None,
        typer.Option(metavar="N", help="In windows of N checkpoints that move along the run."),
    ] = None,
    stride: Annotated[
        str | None,
        typer.Option(metavar="N", help="From one window to the next. Default: none overlap"),
    ] = None,
    config: ConfigFile = None,
    set_: Sets = None,
    state_key: StateKey = None,
    task: TaskSpec = None,
    form: Format = "table",
    plot: Plot = None,
    output_best: Annotated[
        Path | None, typer.Option(help="Write the best row's averaged checkpoint here.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="The JSON report. Default: beside --output-best, else none"),
    ] = None,
    force: Force = False,
    methods_from: MethodsFrom = None,
    last: Last = None,
    every: Every = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    nonfinite: Nonfinite = None,
    bn: Annotated[
        str | None, typer.Option(metavar="auto|on|off", help="Recompute BatchNorm for every row.")
    ] = None,
    output_dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Of the files.")] = None,
    memory: Memory = None,
    device: Device = None,
    seed: Seed = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare ways to average, on the same checkpoints and data, and say what is a tie.

    K may be a list: --K 5,10,20. Prints a table; --format json is the whole report. With --windows
    100, a point of the curve for every 100 checkpoints: how much training does an average save?
    """
    from sewa_cli.cli.main import stdout_for_data
    from sewa_cli.present.tables import check_format, render
    from sewa_cli.report.part import to_json

    check_format(form)
    settings = load(
        config,
        set_,
        checkpoints=ckpts,
        state_key=state_key,
        task=task,
        last=last,
        every=every,
        from_step=from_step,
        to_step=to_step,
        nonfinite=nonfinite,
        bn=bn,
        output_dtype=output_dtype,
        memory=memory,
        device=device,
        seed=seed,
        solver=solver,
        **{
            "compare.fast": fast or None,
            "compare.methods": methods,
            "compare.K": K,
            "compare.methods_from": methods_from,
            "compare.windows": windows,
            "compare.stride": stride,
        },
    )
    in_windows = settings.compare.windows is not None
    if stride is not None and not in_windows:
        raise ConfigError("--stride: lies between windows; say how large they are: --windows 100")
    if output_best is not None and in_windows:
        raise ConfigError("--output-best: windows have no best average; compare without --windows")
    if str(output_best) == "-":
        raise ConfigError("--output-best: - is not a file; name one")
    refuse_plot(plot, force)
    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.commands.compare import run_compare
        from sewa_cli.output.destination import report_path

        if output_best is not None:
            report = report or report_path(output_best)
        files = [path.resolve() for path in (output_best, report, plot) if path is not None]
        if len(set(files)) < len(files):
            raise ConfigError("--output-best, --report and --plot must name different files")
        protected = inputs_of(config, settings)
        if in_windows:
            from sewa_cli.cli.windows import compare_windows

            compare_windows(
                settings,
                Talk(quiet, verbose),
                stdout,
                form,
                plot=plot,
                report=report,
                force=force,
                protected=protected,
            )
            return
        with Talk(quiet, verbose) as talk:
            found = run_compare(
                settings,
                load_user_task(settings, talk.say),
                talk,
                output_best=output_best,
                report=report,
                force=force,
                protected=protected,
            )
        if form == "json":
            text = to_json(found)
        else:
            rows = rows_of(found)
            text = render(for_people(rows) if form in ("table", "markdown") else rows, form)
        stdout.write(text.encode())
        stdout.flush()
        if plot is not None:
            from sewa_cli.present.plots import save_figure
            from sewa_cli.present.plots.compare import plot_comparison

            save_figure(plot_comparison(found), plot, force)
        talk.say(verdict(found))
        for path in (found.output, plot):
            if path is not None:
                talk.say(f"wrote {path}")


def rows_of(found: Comparison) -> list[dict[str, Cell]]:
    """Flat rows, the same columns in every one."""
    from sewa_cli.present.tables import even

    flat: list[dict[str, Cell]] = []
    for row in found.rows:
        cells: dict[str, Cell] = {
            "method": row.method,
            "K": row.K,
            "size": row.size,
            "selection_loss": row.selection_loss,
            "predicted_loss": row.predicted_loss,
            "surrogate_error": row.surrogate_error,
            "heldout_loss": row.heldout_loss,
            "low": row.interval.low if row.interval else None,
            "high": row.interval.high if row.interval else None,
            "spread": row.spread,
            "minus_best": row.difference,
            "minus_best_low": row.difference_interval.low if row.difference_interval else None,
            "minus_best_high": row.difference_interval.high if row.difference_interval else None,
            "mark": row.mark,
            **{metric_column(name, COLUMNS): value for name, value in (row.metrics or {}).items()},
            "forward": row.cost.forward_passes,
            "backward": row.cost.backward_passes,
            "MB_read": round(row.cost.bytes_read / 1e6, 3),
            "seconds": round(row.cost.seconds, 3),
        }
        flat.append(cells)
    return even(flat)


COLUMNS = {"method", "K", "size", "selection_loss", "heldout_loss", "low", "high", "spread"}
COLUMNS |= {"predicted_loss", "surrogate_error"}
COLUMNS |= {"minus_best", "minus_best_low", "minus_best_high", "mark"}
COLUMNS |= {"forward", "backward", "MB_read", "seconds"}


def metric_column(metric: str, taken: Container[str]) -> str:
    """A metric that is named like a column of ours must not take its place."""
    return f"metric_{metric}" if metric in taken else metric


def for_people(rows: list[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """Intervals in one column each, shorter names, and no column that says nothing."""
    from sewa_cli.present.tables import show

    empty = {name for name in rows[0] if name != "K" and all(row[name] is None for row in rows)}

    def interval(row: dict[str, Cell], low: str, high: str) -> Cell:
        return None if row[low] is None else f"{show(row[low])} .. {show(row[high])}"

    names = {
        "selection_loss": "selection",
        "predicted_loss": "predicted",
        "surrogate_error": "off by",
        "heldout_loss": "held-out",
        "low": "95 %",
        "minus_best": "minus best",
        "minus_best_low": "95 % of that",
        "MB_read": "MB read",
    }
    short = []
    for row in rows:
        cells: dict[str, Cell] = {}
        for name, cell in row.items():
            if name in ("low", "minus_best_low"):
                cell = interval(row, name, name.replace("low", "high"))
            if name not in ("high", "minus_best_high") and name not in empty:
                cells[names.get(name, name)] = cell
        short.append(cells)
    return short


def verdict(found: Comparison) -> str:
    """One sentence, never a winner inside the noise."""
    if found.best is None:
        return "no winner: there is no finite held-out loss to compare by"
    best = found.rows[found.best]
    name = best.method + (f" K={best.K}" if best.K is not None else "")
    if len({str(row.coefficients) for row in found.rows}) == 1:
        return f"{name} has nothing to be compared with"
    if found.winner is not None:
        return f"{name} has the lowest held-out loss, and nothing ties with it"
    if best.mark is None:
        return f"{name} has the lowest held-out loss; too few rows to say whether by luck"
    ties = sum(row.mark == "tie" for row in found.rows)
    return (
        f"no winner: {name} has the lowest held-out loss, but {ties} of the other "
        f"{len(found.rows) - 1} cannot be told apart from it"
    )


def methods(
    methods_from: MethodsFrom = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with options.")] = False,
) -> None:
    """List the ways to average, one line each."""
    from sewa_cli.cli.main import stdout_for_data
    from sewa_cli.config import find_config, load_config

    with stdout_for_data() as stdout:
        from sewa_cli.methods import REGISTRY
        from sewa_cli.methods.proposing import register_methods

        settings = load_config(find_config(None), {"compare.methods_from": methods_from})
        register_methods(settings)
        width = max(len(name) for name in REGISTRY)
        if as_json:
            listed = {
                name: {
                    "line": found.line,
                    "needs_loss": found.needs_loss,
                    "takes_K": found.has_budget,
                    "options": dict(found.options),
                }
                for name, found in REGISTRY.items()
            }
            text = json.dumps(listed, indent=2, ensure_ascii=False) + "\n"
        else:
            text = ""
            for name, found in REGISTRY.items():
                options = "".join(f" [{key}={value}]" for key, value in found.options.items())
                text += f"{name:{width}}  {found.line}{options}\n"
        stdout.write(text.encode())
