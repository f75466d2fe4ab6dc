"""`sewa inspect`: its flags and its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from sewa_cli.cli.options import (
    Checkpoints,
    ConfigFile,
    Every,
    Force,
    FromStep,
    Last,
    Plot,
    Quiet,
    Sets,
    StateKey,
    ToStep,
    Verbose,
    load,
    refuse_plot,
)
from sewa_cli.present.tables import Cell, render

if TYPE_CHECKING:
    from sewa_cli.commands.inspect import Found, Inspection, Motion


def inspect(
    ckpts: Checkpoints = None,
    config: ConfigFile = None,
    set_: Sets = None,
    state_key: StateKey = None,
    last: Last = None,
    every: Every = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    plot: Plot = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what checkpoints are there, and whether the run still moves. Needs no task.

    Steps, gaps, sizes, dtypes, duplicates, NaN and Inf; distances from the last and from the mean;
    cosines of successive steps.
    """
    from sewa_cli.cli.main import stdout_for_data

    settings = load(
        config,
        set_,
        checkpoints=ckpts,
        state_key=state_key,
        last=last,
        every=every,
        from_step=from_step,
        to_step=to_step,
    )
    refuse_plot(plot, force)
    with stdout_for_data() as stdout:
        from sewa_cli.cli.console import Talk
        from sewa_cli.commands.inspect import run_inspect
        from sewa_cli.present.plots import save_figure
        from sewa_cli.present.plots.inspect import plot_inspection
        from sewa_cli.report.part import to_json

        with Talk(quiet, verbose) as talk:
            found = run_inspect(settings, talk, plot)
        if plot is not None:
            rows = found.checkpoints
            figure = plot_inspection(
                steps=[row.step for row in rows],
                to_last=[row.to_last for row in rows],
                to_mean=[row.to_mean for row in rows],
                cosines=[row.cosine for row in rows],
                title=found.explanation.partition(":")[0],
            )
            save_figure(figure, plot, force)
            talk.say(f"wrote {plot}")
        stdout.write((to_json(found) if as_json else _describe(found)).encode())


def _describe(found: Inspection) -> str:
    """The facts, a row for each checkpoint, the run beside three simple ways of moving."""
    facts = "".join(f"{name:>11}  {text}\n" for name, text in _facts(found).items())
    parts = [facts, render(_table(found.checkpoints), "table")]
    if found.motion is not None:
        parts.append(render(_signs(found.motion), "table"))
    return "\n".join([*parts, f"{found.explanation}\n"])


def _facts(found: Inspection) -> dict[str, str]:
    rows = found.checkpoints
    sizes = [row.size for row in rows]
    each = " to ".join(dict.fromkeys([_bytes(min(sizes)), _bytes(max(sizes))]))
    gaps = [
        f"{gap.after} to {gap.before}" + (f" ({gap.missing} missing)" if gap.missing else "")
        for gap in found.gaps
    ]
    return {
        "checkpoints": f"{len(rows)}{_steps(found)}",
        "gaps": _few(gaps),
        "size": f"{_bytes(sum(sizes))}, {each} each",
        "tensors": f"{found.tensors:,}",
        "parameters": f"{found.parameters:,}",
        "dtypes": ", ".join(f"{word} ({n:,})" for word, n in found.dtypes.items()),
        "duplicates": _few([_name(row) for row in rows if row.same_as is not None]),
        "NaN or Inf": _few([_name(row) for row in rows if row.nonfinite]),
    }


def _steps(found: Inspection) -> str:
    first, last = found.checkpoints[0].step, found.checkpoints[-1].step
    if first is None:
        return ", without steps"
    if first == last:
        return f", step {first}"
    spacing = f"every {found.spacing}" if found.spacing else "unevenly spaced"
    return f", steps {first} to {last}, {spacing}"


def _table(rows: Sequence[Found]) -> list[dict[str, Cell]]:
    lines: list[dict[str, Cell]] = []
    losses = dict.fromkeys(name for row in rows for name in row.logged if "loss" in name)
    for row in rows:
        notes = []
        if row.nonfinite:
            notes.append(f"NaN or Inf in {_few(row.nonfinite, 2)}")
        if row.same_as is not None:
            notes.append(f"same as {_name(rows[row.same_as])}")
        lines.append(
            {
                "step": row.step,
                **{name: row.logged.get(name) for name in losses},
                "from last": row.to_last,
                "from mean": row.to_mean,
                "moved": row.length,
                "cosine": None if row.cosine is None else round(row.cosine, 3),
                "size": _bytes(row.size),
                "file": row.path,
                "note": "; ".join(notes),
            }
        )
    return lines


def _signs(motion: Motion) -> list[dict[str, Cell]]:
    titles = {"line": "straight line", "walk": "random walk", "noise": "noise around a point"}
    ways = {"this run": motion.run}
    ways |= {titles[name]: signs for name, signs in (motion.expected or {}).items()}
    return [
        {"": "net displacement / path", **{way: signs.net_to_path for way, signs in ways.items()}},
        {"": "mean cosine of steps", **{way: signs.cosine for way, signs in ways.items()}},
        {"": "explained by a line", **{way: signs.trend for way, signs in ways.items()}},
    ]


def _few(words: Sequence[str], few: int = 5) -> str:
    if not words:
        return "none"
    more = f" and {len(words) - few} more" if len(words) > few else ""
    return ", ".join(words[:few]) + more


def _name(row: Found) -> str:
    return row.path if row.step is None else f"step {row.step}"


def _bytes(size: float) -> str:
    """1234567 → 1.23 MB"""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.5 or unit == "TB":
            break
    return f"{size:.3g} {unit}"
