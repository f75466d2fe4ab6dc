"""The chapter of `sewa select`: what was written, whether that was worth it, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sewa_cli.present import sentences, tables
from sewa_cli.present.page.parts import Chapter, Table, Tile, Words
from sewa_cli.present.page.shared import (
    about,
    again,
    checkpoints,
    cost,
    drawings,
    file_of,
    interval_of,
    section,
    standing_of,
    upper,
)
from sewa_cli.present.sheet import Rows
from sewa_cli.text import duration, examples, number, with_K

if TYPE_CHECKING:
    from sewa_cli.report.select import Report

# what a verdict means to whoever has just opened the page
HEADS: Final = {
    "choosing paid": "A lower loss than the best simple average",
    "choosing did not pay": "A higher loss than the best simple average",
    "undecided": "No certain gain over the best simple average",
    "by cross-validation choosing pays; no held-out loss": (
        "By cross-validation a lower loss than the best simple average"
    ),
    "by cross-validation choosing does not pay; no held-out loss": (
        "By cross-validation a higher loss than the best simple average"
    ),
    "undecided; no held-out loss": "No certain gain over the best simple average",
}


def select(report: Report, name: str | None) -> Chapter:
    verdict = sentences.verdict(report)
    head, _, why = verdict.partition(": ")
    headline = HEADS.get(head)
    written = file_of(report.output) or "the average"
    made = "weighs" if report.blend and not report.instead_of else "is the mean of"
    what = f"{written} {made} {report.K} of {report.k} checkpoints"
    if headline is None:
        headline, why = upper(head), verdict
    elif report.heldout_rows is None and report.expected:  # what is known comes before advice
        why = f"{sentences.expected(report)}; {why}"
    elif not report.instead_of:
        by = why.removeprefix("held-out loss ")
        why = f"its held-out loss, {number(report.average.heldout_loss)}, is {by}"
    best, scores = next(iter(report.references.items()))
    tiles = []
    if report.heldout_rows is not None:
        held = examples(report.heldout_rows, report.heldout_groups, " rows")
        tiles += [
            Tile("held-out loss", report.average.heldout_loss, held),
            Tile("best simple average", scores.heldout_loss, best),
        ]
    if report.gained:
        tiles.append(Tile("gained", report.gained.by, interval_of(report.gained.interval)))
    else:
        tiles.append(Tile("selection loss", report.average.selection_loss, "of what was written"))
    if report.expected:
        error = report.expected.error
        sure = "" if error is None else f"± {1.96 * error:.2g} "
        tiles.append(Tile("expected loss", report.expected.loss, f"{sure}on new rows"))
    for metric, value in list((report.average.metrics or {}).items())[:2]:
        other = number((scores.metrics or {}).get(metric))
        tiles.append(Tile(metric, value, f"of what was written; {best}: {other}"))
    tiles.append(Tile("checkpoints", report.K, f"of {report.k:,}{_worth(report)}"))
    tiles.append(Tile("took", duration(report.cost.seconds.total), report.device))

    overfit = [upper(sentences.expected(report))] if report.expected else []
    for better in report.beaten_by:
        said = f"{better.name} has a lower held-out loss, {number(better.heldout_loss)}"
        if better.by is not None:
            sure = f" ({interval_of(better.interval)})" if better.interval else ""
            said += f": {number(better.by)}{sure} below what was chosen"
        overfit.append(said)
    if report.labels == "weak":
        overfit.append("Mixed-up rows fit as well: rows tell averages apart as a whole, not singly")
    if report.labels == "noise":
        overfit.append("Mixed-up rows fit as well: the labels say nothing")
    budget = [Words([upper(sentences.budget(report.budget))])] if report.budget else []
    drawn, pulled = drawings(report, "loss"), []
    if drawn and report.blend and report.expected and not report.instead_of:
        pulled = [
            Words(
                [
                    "Dots are predictions around the prior; the solid line is what to expect of "
                    "the answer, corrected by how far its own prediction was off."
                ]
            )
        ]
    sheet = tables.select(report)
    seen = sheet.parts[0][1]
    assert isinstance(seen, list)
    what_is_marked = "" if report.heldout_rows is None else "; marked by the lowest held-out loss"
    title = f"Losses and metrics{what_is_marked}"
    table = Table(title, seen, marks=_lowest(sheet.rows, report.written))
    sections = [
        *section(
            "Against simple averages",
            *drawings(report, "scores"),
            table,
        ),
        *section(
            "Which checkpoints, and how much of each",
            Words([upper(sentences.taken(report))]),
            *drawings(report, "weights"),
            *checkpoints(report.candidates, report.left_out),
        ),
        *section("How the loss changes", *drawn[:1], *pulled, *drawn[1:], *budget, _simple(report)),
        *section("Does it over-fit?", Words(overfit) if overfit else None),
        *standing_of(report.standing),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=headline,
        answer=f"{what}; {why}",
        sections=sections,
        tiles=tiles[:6],
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )


def _lowest(rows: Rows, written: str) -> list[str | None]:
    """The best row, and the one that was written, whether it is the best or not."""
    losses = [row["heldout_loss"] for row in rows]
    known = [loss for loss in losses if isinstance(loss, float)]
    lowest = min(known, default=None)
    return [
        "best"
        if lowest is not None and loss == lowest
        else "chosen"
        if row["average"] == written
        else None
        for row, loss in zip(rows, losses, strict=True)
    ]


def _simple(report: Report) -> Table | None:
    rows: Rows = [
        {"average": with_K(one.name, one.K), "selection loss": one.selection_loss}
        for one in report.simple
    ]
    title = f"The {len(rows)} simple averages that it was held against"
    return Table(title, rows, folded=True) if rows else None


def _worth(report: Report) -> str:
    blend = None if report.instead_of else report.blend
    return f", worth {blend.effective:.3g} equal ones" if blend else ""
