"""`sewa compare --windows`: what it prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sewa_cli.cli.compare import metric_column
from sewa_cli.cli.options import load_user_task
from sewa_cli.present.tables import Cell, even, render, show
from sewa_cli.report.compare import Row
from sewa_cli.report.part import to_json
from sewa_cli.report.windows import Reach, Windows

if TYPE_CHECKING:
    from sewa_cli.cli.console import Talk
    from sewa_cli.config import Config

LOSS = {"heldout_loss": "held-out loss", "selection_loss": "selection loss"}


def compare_windows(
    settings: Config,
    talk: Talk,
    stdout: IO[bytes],
    form: str,
    *,
    plot: Path | None,
    report: Path | None,
    force: bool,
    protected: Sequence[Path],
) -> None:
    """Tables, or rows for programs, on stdout; sentences on stderr."""
    from sewa_cli.commands.windows import run_windows

    with talk:
        task = load_user_task(settings, talk.say)
        found = run_windows(settings, task, talk, report=report, force=force, protected=protected)
    if form == "json":
        text = to_json(found)
    elif form in ("table", "markdown"):
        text = "\n".join(_titled(title, rows, form) for title, rows in tables_of(found))
    else:
        text = render(rows_of(found), form)
    stdout.write(text.encode())
    stdout.flush()
    if plot is not None:
        from sewa_cli.present.plots import save_figure
        from sewa_cli.present.plots.windows import plot_windows

        save_figure(plot_windows(found), plot, force)
    for sentence in verdict(found):
        talk.say(sentence)
    if plot is not None:
        talk.say(f"wrote {plot}")


def _titled(title: str, rows: Sequence[dict[str, Cell]], form: str) -> str:
    table = render(rows, form)
    return f"**{title}**\n\n{table}" if form == "markdown" else f"{title}\n{table}"


def rows_of(found: Windows) -> list[dict[str, Cell]]:
    """For programs: a row for each method in each window."""
    flat: list[dict[str, Cell]] = []
    for i, window in enumerate(found.windows):
        for row in window.rows:
            cells: dict[str, Cell] = {
                "window": i,
                "at": window.at,
                "first_step": window.first_step,
                "last_step": window.last_step,
                "method": row.method,
                "K": row.K,
                "size": row.size,
                "selection_loss": row.selection_loss,
                "heldout_loss": row.heldout_loss,
                "spread": row.spread,
                "best": row.mark == "best",
            }
            metrics = row.metrics or {}
            cells |= {metric_column(name, cells): value for name, value in metrics.items()}
            flat.append(cells)
    return even(flat)


def tables_of(found: Windows) -> Iterator[tuple[str, list[dict[str, Cell]]]]:
    """For people: windows as rows and methods as columns, by loss and by each metric; and when."""
    measure = LOSS[found.level.measure]
    unit = "after step" if found.by == "step" else "checkpoints"
    by_loss: list[dict[str, Cell]] = []
    for window in found.windows:
        cells: dict[str, Cell] = {unit: window.at}
        cells |= {_name(row): getattr(row, found.level.measure) for row in window.rows}
        cells["lowest"] = ", ".join(_name(row) for row in window.rows if row.mark == "best") or None
        by_loss.append(cells)
    yield f"{measure}, in windows of {found.size} checkpoints", by_loss
    for metric in _metrics(found):
        yield (
            metric,
            [
                {unit: window.at}
                | {_name(row): (row.metrics or {}).get(metric) for row in window.rows}
                for window in found.windows
            ],
        )
    yield f"when the last checkpoint's level is reached and kept: {_level(found)}", _whens(found)


def _whens(found: Windows) -> list[dict[str, Cell]]:
    short = LOSS[found.level.measure].removesuffix(" loss")
    unit = "after step" if found.by == "step" else "after checkpoints"
    rows: list[dict[str, Cell]] = []
    for reach in found.reaches:
        cells: dict[str, Cell] = {
            "method": _name(reach),
            unit: "never" if reach.at is None else f"{reach.at:,}",
            "of training": None if reach.share is None else _percent(reach.share),
            short: reach.loss,
        }
        there = reach.metrics or {}
        cells |= {metric_column(name, cells): there.get(name) for name in _metrics(found)}
        cells["first touched"] = None if reach.touched is None else found.windows[reach.touched].at
        rows.append(cells)
    return rows


def _metrics(found: Windows) -> list[str]:
    rows = [row for window in found.windows for row in window.rows]
    return list(dict.fromkeys(name for row in rows for name in row.metrics or {}))


def verdict(found: Windows) -> list[str]:
    """What the averages save, if anything; and how much the level itself is worth."""
    if found.level.value is None:
        return ["the last checkpoint has no finite loss: there is no level to reach"]
    if len(found.windows) == 1:
        return []
    last = next(reach for reach in found.reaches if reach.method == "last")
    others = [reach for reach in found.reaches if reach.method != "last"]
    reached = [reach for reach in others if reach.window is not None]
    level = f"the last checkpoint's level ({_level(found)})"
    sentences = []
    if others and not reached:
        sentences.append(f"no average reaches {level} and keeps it")
    elif reached:
        first = min(reached, key=lambda reach: (reach.window, reach.loss))
        also = sum(reach.window == first.window for reach in reached) - 1
        more = f", and so {'does' if also == 1 else 'do'} {also} of the others" if also else ""
        sentences.append(f"{_name(first)} reaches {level} {_after(found, first)}{more}")
        sentences += _metrics_there(found, first)
        if last.window is not None and (first.window or 0) >= last.window:
            sentences.append("`last` itself does so as early: averaging saves no training here")
        else:
            sentences.append(f"`last` itself does so {_after(found, last)}")
    before = [_loss_of_last(found, i) for i in range(len(found.windows) - 1)]
    easy = sum(loss is not None and loss <= found.level.value for loss in before)
    if easy:
        worth = ", so that reaching it says little" if 2 * easy >= len(before) else ""
        sentences.append(
            f"the last checkpoint is one of many: at the end of {easy} of the {len(before)} "
            f"windows before it, training was at that level already{worth}"
        )
    return sentences


def _metrics_there(found: Windows, reach: Reach) -> Iterator[str]:
    """The loss alone has decided; a metric may say otherwise."""
    in_the_end = found.level.metrics or {}
    for name, value in (reach.metrics or {}).items():
        yield f"{name} of {_name(reach)} there: {show(value)}; in the end, of `last`: " + show(
            in_the_end.get(name)
        )


def _after(found: Windows, reach: Reach) -> str:
    unit = "steps" if found.by == "step" else "checkpoints"
    share = "" if reach.share is None else f": {_percent(reach.share)} of the training"
    return f"after {reach.at:,} {unit}{share}"


def _loss_of_last(found: Windows, window: int) -> float | None:
    row = next(row for row in found.windows[window].rows if row.method == "last")
    loss: float | None = getattr(row, found.level.measure)
    return loss


def _level(found: Windows) -> str:
    where = "step" if found.by == "step" else "checkpoint"
    return f"{LOSS[found.level.measure]} {show(found.level.value)} at {where} {found.level.at:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _name(one: Row | Reach) -> str:
    return one.method + (f" K={one.K}" if one.K is not None else "")
