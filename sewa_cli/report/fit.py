"""Check that the parts of a report are consistent, which no model says field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sewa_cli.report.compare import Comparison, Row
    from sewa_cli.report.evaluate import Evaluation
    from sewa_cli.report.inspect import Inspection
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Candidate, Head


def misfit(report: Head) -> str | None:
    """Return the first contradiction, or None."""
    check = globals().get(report.kind, lambda _: ())
    return next(iter(check(report)), None)


def select(report: Report) -> Iterator[str]:
    yield from _candidates(report.candidates, report.k)
    if not 0 < report.K <= report.k:
        yield f"K is {report.K} of {report.k}"
    for name in ("selected", "selected_steps", "selected_paths"):
        if (count := len(getattr(report, name))) != report.K:
            yield f"{name} has {count} entries, K is {report.K}"
    if len({*report.selected} & {*range(report.k)}) < report.K:
        yield "selected: some are not candidates, or listed twice"
    if report.contest is None and "last" not in report.references:
        yield "references: the last checkpoint is missing"
    if report.contest is None and any(
        one.name not in report.references for one in report.verdict.beaten_by
    ):
        yield "verdict: beaten by an average that is not among the references"
    if report.contest is not None and not report.contest.scores:
        yield "contest: there are no scores"
    if report.blend and (len(report.blend.weights) != report.k or not report.blend.path):
        yield "blend: its prior is not one of these candidates"
    if report.blend and not report.blend.prior:
        yield "blend: without a prior"
    if report.budget is not None and not any(option.chosen for option in report.budget):
        yield "budget: nothing is chosen"


def compare(report: Comparison) -> Iterator[str]:
    yield from _candidates(report.candidates, report.k)
    yield from _rows(report.rows, report.k)
    if report.best is not None and not 0 <= report.best < len(report.rows):
        yield f"best: there is no row {report.best}"


def inspect(report: Inspection) -> Iterator[str]:
    count = len(report.checkpoints)
    if not count:
        yield "checkpoints: there are none"
    if any(not 0 <= (one.same_as or 0) < count for one in report.checkpoints):
        yield "same_as: a checkpoint that is not there"


def evaluate(report: Evaluation) -> Iterator[str]:
    if not report.files:
        yield "files: there are none"


def _candidates(found: list[Candidate], k: int) -> Iterator[str]:
    if not found or [one.index for one in found] != [*range(k)]:
        yield f"candidates: not {k}, numbered from 0"


def _rows(rows: list[Row], k: int) -> Iterator[str]:
    if not rows:
        yield "rows: there are none"
    for row in rows:
        if any(len(weights) != k for weights in row.coefficients):
            yield f"{row.method}: not a coefficient for each of {k}"
