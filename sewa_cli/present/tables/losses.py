"""Of losses: what averages score, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.sheet import Cell, Ordered, Rows, Sheet, beside, plain
from sewa_cli.text import examples

if TYPE_CHECKING:
    from sewa_cli.report.compare import Comparison, Row, RowContest, RowScore
    from sewa_cli.report.evaluate import Evaluation
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Interval

LOSS = {"heldout_loss": "held-out loss", "selection_loss": "selection loss"}


def select(report: Report) -> Sheet:
    """The average beside its references."""
    chosen = {}
    if report.instead_of and report.learned:
        chosen = {report.instead_of: report.learned}
    elif report.written not in report.references:
        chosen = {report.written: report.average}
    best = next(iter(report.references), None)
    own = examples(report.selection_rows, report.selection_groups)
    titles = {"uniform": f"uniform (all {report.k})"}
    if best is not None:
        titles[best] = f"{titles.get(best, best)} (best baseline)"
    expected: dict[str | None, float] = {}
    if report.expected:  # of what was chosen, and of the simple average that folds would choose
        if report.expected.by is not None:
            expected[best] = report.expected.loss + report.expected.by
        expected[next(iter(chosen), report.written)] = report.expected.loss
    rows: Rows = []
    seen: Rows = []
    for name, scores in {**chosen, **report.references}.items():
        losses: dict[str, Cell] = {"selection_loss": scores.selection_loss}
        cells: dict[str, Cell] = {
            "average": titles.get(name, name),
            f"selection loss ({own})": scores.selection_loss,
        }
        if expected:
            losses["expected_loss"] = cells["expected loss"] = expected.get(name)
        losses["heldout_loss"] = scores.heldout_loss
        if report.heldout_rows is not None:
            held = examples(report.heldout_rows, report.heldout_groups)
            cells[f"held-out loss ({held})"] = scores.heldout_loss
        metrics = beside(scores.metrics, {*cells, *losses})
        rows.append({"average": name, **losses, **metrics})
        seen.append({**cells, **metrics})
    return Sheet(rows, [("", seen)])


def evaluate(report: Evaluation) -> Sheet:
    rows: Rows = []
    for file in report.files:
        row: dict[str, Cell] = {"path": file.path, "step": file.step}
        if report.selection_rows:  # a task that is scored by a metric may have no loss
            row["selection_loss"] = file.selection_loss
        if report.heldout_rows is not None:
            row["heldout_loss"] = file.heldout_loss
        rows.append({**row, **beside(file.metrics, row)})
    return Sheet(rows)


def compare(report: Comparison) -> Sheet:
    """A row for each method at each K."""
    metric = report.judged.metric if report.judged else ""
    rows = [_compared(row, metric) for row in report.rows]
    # for people: an interval is one column, names are short, and no column says nothing
    said = {name for row in rows for name, cell in row.items() if cell is not None or name == "K"}
    if report.judged:  # what there was none of: a metric may do without passes of ours
        said -= {name for name in _COUNTS if not any(row.get(name) for row in rows)}
    seen: Rows = []
    for row in rows:
        cells = {name: cell for name, cell in row.items() if name in said}
        for low, high in (
            ("low", "high"),
            ("minus_best_low", "minus_best_high"),
            ("behind_best_low", "behind_best_high"),
        ):
            if cells.pop(high, None) is not None and isinstance(lowest := row[low], float):
                cells[low] = Ordered(f"{plain(lowest)} .. {plain(row[high])}", lowest)
        short = _SHORT | {f"heldout_{metric}": f"held-out {metric}"}
        seen.append({short.get(name, name): cell for name, cell in cells.items()})
    return Sheet(rows, [("", seen)])


_COUNTS = ("failed", "forward", "backward")
_SHORT = {
    "selection_loss": "selection",
    "predicted_loss": "predicted",
    "surrogate_error": "off by",
    "heldout_loss": "held-out",
    "low": "95 %",
    "minus_best": "minus best",
    "minus_best_low": "95 % of that",
    "behind_best": "behind best",
    "behind_best_low": "95 % of that ",
    "MB_read": "MB read",
}


def _compared(row: Row, metric: str) -> dict[str, Cell]:
    found: dict[str, Cell] = {
        "method": row.method,
        "K": row.K,
        "size": row.size,
        "selection_loss": row.selection_loss,
        "predicted_loss": row.predicted_loss,
        "surrogate_error": row.surrogate_error,
        "heldout_loss": row.heldout_loss,
        **({f"heldout_{metric}": row.score.heldout} if row.score else {}),
        **({"failed": row.score.failed} if row.score else {}),
        **_ends("", row.held[1]),
        "spread": row.spread,
        "minus_best": row.difference,
        **_ends("minus_best_", row.difference_interval),
        **(_behind(row.score) if row.score else {}),
        "mark": row.mark,
        **({"contest": _contest(row.contest)} if row.score else {}),
    }
    cost: dict[str, Cell] = {
        **({"evaluations": row.cost.evaluations} if row.score else {}),
        "forward": row.cost.forward_passes,
        "backward": row.cost.backward_passes,
        "MB_read": round(row.cost.bytes_read / 1e6, 3),
        "seconds": round(row.cost.seconds, 3),
    }
    return {**found, **beside(row.metrics, {*found, *cost, *_SHORT.values()}), **cost}


def _contest(found: RowContest | None) -> str | None:
    """How a method that chooses by the metric came to its choice."""
    if found is None:
        return None
    said = "crowned" if found.crowned else "nobody crowned"
    if found.crowned is None:
        said = "too few parts to crown"
    return f"{said}, interrupted" if found.interrupted else said


def _behind(score: RowScore) -> dict[str, Cell]:
    return {"behind_best": score.behind, **_ends("behind_best_", score.behind_interval)}


def _ends(name: str, interval: Interval | None) -> dict[str, Cell]:
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}low": low, f"{name}high": high}
