"""The view of `compare`: every method at every K, which is best, and which tie with it."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Final

from sewa_cli.direction import comparative, loss_of
from sewa_cli.present.charts import Chart, Dots, rows_panel, weights_panel
from sewa_cli.present.parts import (
    MOST_DRAWN,
    checkpoints,
    cost_section,
    ends,
    recalled,
    section,
    standing,
    standing_section,
    wrote,
)
from sewa_cli.present.view import Cell, Picture, Rows, Table, View, Words, metrics_of
from sewa_cli.present.views.metric import failures
from sewa_cli.text import with_K

if TYPE_CHECKING:
    from sewa_cli.report.kinds import ComparedRow, Comparison
    from sewa_cli.report.shared import Interval

_MARKS: Final = {
    "best": "best",
    "tie": "ties with the best",
    "worse": "worse",
    None: "not compared",
}
_COUNTS: Final = ("failed", "forward", "backward")
_DETAILS: Final = ("size", "selection", "95 % CI", "spread", *_COUNTS, "MB read", "seconds")
_SHORT: Final = {
    "selection_loss": "selection",
    "predicted_loss": "predicted",
    "surrogate_error": "off by",
    "heldout_loss": "held-out",
    "low": "95 % CI",
    "minus_best": "minus best",
    "minus_best_low": "95 % CI of that",
    "behind_best": "behind best",
    "behind_best_low": "95 % CI of that ",
    "MB_read": "MB read",
}


def view(report: Comparison) -> View:
    judged, failed = verdict(report), _failed(report)
    rows = [_cells(row, report.judged.metric if report.judged else "") for row in report.rows]
    seen, chart = _seen(report, rows), _chart(report)
    marks = [row.mark for row in report.rows]
    best = None if report.best is None else report.rows[report.best]
    is_held = report.heldout_rows is not None or report.judged is not None
    meaning = (
        f"★ has the {_measure(report)}; = ties with it, by a paired bootstrap over "
        f"{_unit(report)} that holds for all pairs at once; bars are each row's own "
        "interval, and overlap even if the difference is significant"
    )
    return View(
        headline=_headline(report),
        caveat=_reason(report),
        says=[*(judged, *failed, *wrote(report.output), *recalled(report.cost))],
        details=standing(report.standing),
        rows=rows,
        tables=[Table("", seen, details=_DETAILS if report.heldout_rows else ())],
        sections=[
            *section(
                "Every method at every K",
                Picture(chart),
                Words([meaning, *failed]) if is_held else None,
                Table("Losses, metrics and cost", seen, False, marks),
            ),
            *section(
                "Which checkpoints",
                _weights(report),
                *checkpoints(report.candidates, report.left_out),
            ),
            *standing_section(report.standing),
            cost_section(report.cost, report.placement),
        ],
        plot=chart,
        numbers=dict(_numbers(report)),
        names={
            "best": None if best is None else with_K(best.method, best.K),
            "winner": report.winner,
        },
    )


def _measure(report: Comparison) -> str:
    """Name what the best row has: the lowest held-out loss, the highest held-out return."""
    if report.judged is None:
        return "lowest held-out loss"
    return f"{comparative(report.judged.goal)[:-2]}est held-out {report.judged.metric}"


def verdict(report: Comparison) -> str:
    no_winner = "no winner: " if report.verdict in ("none", "equal", "tie") else ""
    return f"{no_winner}{_reason(report)}"


def _reason(report: Comparison) -> str:
    what = "loss" if report.judged is None else report.judged.metric
    if report.best is None:
        return f"there is no finite held-out {what} to compare by"
    best = report.rows[report.best]
    name, others = with_K(best.method, best.K), len(report.rows) - 1
    has = f"`{name}` has the {_measure(report)}"
    if report.verdict == "alone":
        return f"`{name}` has nothing to be compared with"
    if report.verdict == "equal":
        return f"every row has the same held-out {what}"
    if report.verdict == "winner":
        return f"{has}, and nothing ties with it"
    if report.verdict == "too few":
        return f"{has}; too few {_unit(report)} for a confidence interval"
    ties = sum(row.mark == "tie" for row in report.rows)
    tying = "all others" if ties == others else f"{ties} of the other {others}"
    return f"{has}, but {tying} tie with it"


def _unit(report: Comparison) -> str:
    return "examples" if report.unit in (None, "rows") else report.unit


def _headline(report: Comparison) -> str:
    if report.best is None or report.verdict in ("equal", "tie"):
        return "No winner"
    best = report.rows[report.best]
    name = with_K(best.method, best.K)
    return f"{name} wins" if report.verdict == "winner" else f"{name} has the {_measure(report)}"


def _failed(report: Comparison) -> list[str]:
    judged = report.judged
    if judged is None:
        return []
    counts = {
        with_K(row.method, row.K): None if score.failed and score.heldout is None else score.failed
        for row in report.rows
        if (score := row.score) is not None
    }
    return failures(counts, judged.parts, judged.left_out, judged.failure_counts_as, judged.metric)


def _cells(row: ComparedRow, metric: str) -> dict[str, Cell]:
    found: dict[str, Cell] = {
        "method": row.method,
        "K": row.K,
        "size": row.size,
        "selection_loss": row.selection_loss,
        "predicted_loss": row.predicted_loss,
        "surrogate_error": row.surrogate_error,
        "heldout_loss": row.heldout_loss,
    }
    if row.score:
        found |= {f"heldout_{metric}": row.score.heldout, "failed": row.score.failed}
    found |= {**_ends("", row.held[1]), "spread": row.spread, "minus_best": row.difference}
    found |= _ends("minus_best_", row.difference_interval)
    if row.score:
        found["behind_best"] = row.score.behind
        found |= _ends("behind_best_", row.score.behind_interval)
    found["mark"] = row.mark
    if row.score:
        found["contest"] = _contest(row)
    cost: dict[str, Cell] = {"evaluations": row.cost.evaluations} if row.score else {}
    cost |= {
        "forward": row.cost.forward_passes,
        "backward": row.cost.backward_passes,
        "MB_read": round(row.cost.bytes_read / 1e6, 3),
        "seconds": round(row.cost.seconds, 3),
    }
    return {**found, **metrics_of(row.metrics, {*found, *cost, *_SHORT.values()}), **cost}


def _ends(name: str, interval: Interval | None) -> dict[str, Cell]:
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}low": low, f"{name}high": high}


def _contest(row: ComparedRow) -> str | None:
    if row.contest is None:
        return None
    words = {True: "confirmed", False: "not confirmed", None: "too few parts to confirm"}
    return f"{words[row.contest.confirmed]}{', interrupted' if row.contest.interrupted else ''}"


def _seen(report: Comparison, rows: Rows) -> Rows:
    """Leave out empty columns, shorten names, and make an interval one column."""
    said = {name for row in rows for name, cell in row.items() if cell is not None or name == "K"}
    if report.judged:  # a metric may need none of our passes
        said -= {name for name in _COUNTS if not any(row.get(name) for row in rows)}
        short = _SHORT | {f"heldout_{report.judged.metric}": f"held-out {report.judged.metric}"}
    else:
        short = _SHORT
    seen: Rows = []
    for row in rows:
        cells = {name: cell for name, cell in row.items() if name in said}
        for before in ("", "minus_best_", "behind_best_"):
            low, high = f"{before}low", cells.pop(f"{before}high", None)
            if isinstance(lowest := row.get(low), float) and isinstance(high, float):
                cells[low] = ends(lowest, high)
        seen.append({short.get(name, name): cell for name, cell in cells.items()})
    return seen


def _chart(report: Comparison) -> Chart:
    is_held = report.heldout_rows is not None or report.judged is not None
    known = [row for row in report.rows if _score(row, is_held) is not None]
    ranked = sorted(known, key=lambda row: _loss(report, row))[:MOST_DRAWN]
    dots = [
        Dots(
            title,
            [_score(row, is_held) if row.mark == mark else None for row in ranked],
            is_hollow=mark == "tie",
            intervals=[_held(row) if is_held and row.mark == mark else None for row in ranked],
            marker="*" if mark == "best" else "o",
        )
        for mark, title in _MARKS.items()
        if any(row.mark == mark for row in ranked)
    ]
    what = "loss" if report.judged is None else report.judged.metric
    label = f"held-out {what}" if is_held else "selection loss (nothing held out)"
    few = f" The best {MOST_DRAWN} rows are drawn." if len(known) > MOST_DRAWN else ""
    return Chart(
        f"{what.capitalize()} of each method, the best first",
        f"A row for each method at each K, with its 95 % interval. {verdict(report)}.{few}",
        [rows_panel([with_K(row.method, row.K) for row in ranked], dots, label, apart=False)],
    )


def _score(row: ComparedRow, is_held: bool) -> float | None:
    return row.held[0] if is_held else row.selection_loss


def _held(row: ComparedRow) -> tuple[float, float] | None:
    interval = row.held[1]
    return None if interval is None else (interval.low, interval.high)


def _loss(report: Comparison, row: ComparedRow) -> float:
    value = row.held[0]
    if value is None:
        return inf if row.selection_loss is None else row.selection_loss
    return value if report.judged is None else loss_of(value, report.judged.goal)


def _weights(report: Comparison) -> Picture | None:
    if report.best is None or not report.rows[report.best].coefficients:
        return None
    best = report.rows[report.best]
    panel = weights_panel([one.step for one in report.candidates], best.coefficients[0])
    alt = f"{best.size} of {report.k} checkpoints have a coefficient."
    return Picture(Chart(f"Coefficients of {with_K(best.method, best.K)}", alt, [panel]))


def _numbers(report: Comparison) -> Iterator[tuple[str, float | None]]:
    for row in report.rows:
        method = with_K(row.method, row.K)
        yield f"{method}/selection_loss", row.selection_loss
        yield f"{method}/heldout_{'score' if row.score else 'loss'}", row.held[0]
        yield f"{method}/seconds", row.cost.seconds
        for name, value in (row.metrics or {}).items():
            yield f"{method}/metrics/{name}", value
