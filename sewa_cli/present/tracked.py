"""What trackers get from a report: numbers, curves and names, under tags that all runs share.

A tag has no space and never the name of an average that one run has and another has not: the
numbers of the best baseline are `baseline_loss` in every run, and its name is under `names`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present import kind_of
from sewa_cli.text import with_K

if TYPE_CHECKING:
    from sewa_cli.report.compare import Comparison
    from sewa_cli.report.evaluate import Evaluation
    from sewa_cli.report.inspect import Inspection
    from sewa_cli.report.metric import MetricScores
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Head

Numbers = Iterator[tuple[str, float | None]]
Points = list[tuple[int, float]]


def numbers(report: Head) -> dict[str, float]:
    """Return every finite number by its tag, such as `sewa/heldout_loss`."""
    found = _NUMBERS.get(kind_of(report), lambda _: iter(()))(report)
    return {
        f"{_root(report)}/{_plain(name)}": float(value)
        for name, value in found
        if value is not None and isfinite(value)
    }


def curves(report: Head) -> dict[str, Points]:
    """Return points by tag: the history by iteration, weights and losses by step."""
    found: dict[str, Points] = {}
    for name, at, value in _CURVES.get(report.kind, lambda _: iter(()))(report):
        if value is not None and isfinite(value):
            found.setdefault(f"{_root(report)}/{_plain(name)}", []).append((at, value))
    return found


def names(report: Any) -> dict[str, str]:
    """Return the names that tags leave out: what was written, the best baseline, the metric."""
    found: dict[str, str | None] = {}
    if (contest := getattr(report, "contest", None)) is not None:
        found = {"metric": contest.metric, "written": next(iter(contest.scores))}
        found |= {"incumbent": contest.incumbent, "leader": contest.leader}
    elif report.kind == "select":
        found = {"written": report.written, "baseline": next(iter(report.references), None)}
    elif report.kind == "compare":
        best = None if report.best is None else report.rows[report.best]
        found = {"best": best and with_K(best.method, best.K), "winner": report.winner}
    return {f"{_root(report)}/{name}": text for name, text in found.items() if text is not None}


def _root(report: Head) -> str:
    return "sewa" if report.kind == "select" else f"sewa/{report.kind}"


def _plain(name: str) -> str:
    """A metric or method as part of a tag: `lawa K=5` is lawa_K=5."""
    return re.sub(r"[^\w.,:=/-]+", "_", name)


def _metrics(found: Mapping[str, float | None] | None, before: str) -> Numbers:
    yield from ((f"metrics/{before}{name}", value) for name, value in (found or {}).items())


def _select(report: Report) -> Numbers:
    measure = "selection_loss" if report.heldout_rows is None else "heldout_loss"
    yield "selection_loss", report.average.selection_loss
    yield "heldout_loss", report.average.heldout_loss
    yield "expected_loss", report.expected.loss if report.expected else None
    yield "vs_baseline", report.verdict.difference
    yield "checkpoints", report.K
    yield from _metrics(report.average.metrics, "")
    references = report.references
    others = {"baseline": next(iter(references.values()), None)}
    others |= {name: references.get(name) for name in ("last", "uniform")}
    for name, scores in others.items():
        if scores is not None:
            yield f"{name}_loss", getattr(scores, measure)
            yield from _metrics(scores.metrics, f"{name}_")


def _contest(report: Report) -> Numbers:
    found = report.contest
    assert found is not None

    def score(one: MetricScores) -> float | None:
        return one.selection if found.heldout_parts is None else one.heldout

    written = next(iter(found.scores.values()))
    yield "selection_score", written.selection
    yield "heldout_score", written.heldout
    yield "vs_baseline", report.verdict.difference
    yield "evaluations", found.evaluations
    yield "checkpoints", report.K
    yield from _metrics(written.others, "")
    asked = {"incumbent": found.incumbent, "leader": found.leader}
    for role, name in {**asked, "last": "last", "uniform": "uniform"}.items():
        if name in found.scores:
            yield f"{role}_score", score(found.scores[name])


def _compare(report: Comparison) -> Numbers:
    for row in report.rows:
        method = with_K(row.method, row.K)
        yield f"{method}/selection_loss", row.selection_loss
        yield f"{method}/heldout_{'score' if row.score else 'loss'}", row.held[0]
        yield f"{method}/seconds", row.cost.seconds
        for tag, value in _metrics(row.metrics, ""):
            yield f"{method}/{tag}", value


def _selected(report: Report) -> Iterator[tuple[str, int, float | None]]:
    yield from (("history", at, loss) for at, loss in enumerate(report.history, 1))
    for one in report.candidates:
        yield "weight", one.index if one.step is None else one.step, one.weight


def _evaluated(report: Evaluation) -> Iterator[tuple[str, int, float | None]]:
    for place, file in enumerate(report.files):
        at = place if file.step is None else file.step
        yield "selection_loss", at, file.selection_loss
        yield "heldout_loss", at, file.heldout_loss
        yield from ((tag, at, value) for tag, value in _metrics(file.metrics, ""))


def _inspected(report: Inspection) -> Iterator[tuple[str, int, float | None]]:
    for place, one in enumerate(report.checkpoints):
        at = place if one.step is None else one.step
        for name in ("to_last", "to_mean", "length", "cosine"):
            yield name, at, getattr(one, name)


_NUMBERS: Final[dict[str, Callable[[Any], Numbers]]] = {
    "select": _select,
    "contest": _contest,
    "compare": _compare,
}
_CURVES: Final[dict[str, Callable[[Any], Iterator[tuple[str, int, float | None]]]]] = {
    "select": _selected,
    "evaluate": _evaluated,
    "inspect": _inspected,
}
