"""The chapter of `sewa select`: what was written, whether that was worth it, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def select(report: Report, name: str | None) -> Chapter:
    written = file_of(report.output) or "the average"
    what = f"{written} averages {report.K} of {report.k} checkpoints"
    caveat = sentences.verdict(report)
    if report.heldout_rows is None and report.expected:  # what is known comes before advice
        caveat = f"{sentences.expected(report)}; {caveat}"
    best, scores = next(iter(report.references.items()))
    tiles = []
    if report.heldout_rows is not None:
        held = examples(report.heldout_rows, report.heldout_groups, " rows")
        tiles += [
            Tile("held-out loss", report.average.heldout_loss, held),
            Tile("best baseline", scores.heldout_loss, best),
        ]
    judged = report.verdict
    if judged.difference is not None:
        note = interval_of(judged.interval)
        tiles.append(Tile("vs best baseline", judged.difference, note))
    else:
        tiles.append(Tile("selection loss", report.average.selection_loss, "of what was written"))
    if report.expected:
        tiles.append(Tile("expected loss", report.expected.loss, "on new data"))
    for metric, value in list((report.average.metrics or {}).items())[:2]:
        other = number((scores.metrics or {}).get(metric))
        tiles.append(Tile(metric, value, f"of what was written; {best}: {other}"))
    tiles.append(Tile("checkpoints", report.K, f"of {report.k:,}{_worth(report)}"))
    tiles.append(Tile("took", duration(report.cost.seconds.total), report.device))

    overfit = [upper(sentences.overfits(report))]
    if report.expected:
        overfit.append(upper(sentences.expected(report)))
    for better in judged.beaten_by:
        said = f"{better.name} has a lower held-out loss, {number(better.score, 3)}"
        if better.difference is not None:
            said += f": {sentences.difference(better)}"
        overfit.append(said)
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
            "Against baselines",
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
        *section("Does it overfit?", Words(overfit)),
        *standing_of(report.standing),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=sentences.headline(report),
        answer=f"{what}; {caveat}",
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
    title = f"All {len(rows)} baselines, by selection loss"
    return Table(title, rows, folded=True) if rows else None


def _worth(report: Report) -> str:
    blend = None if report.instead_of else report.blend
    return f", effective number {blend.effective:.3g}" if blend else ""
