"""The chapter of a choice by a metric: who was taken, what that is worth held out, was it luck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.direction import comparative
from sewa_cli.present import contest as by_metric
from sewa_cli.present import sentences
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
from sewa_cli.text import duration

if TYPE_CHECKING:
    from sewa_cli.report.select import Report


def contest(report: Report, name: str | None) -> Chapter:
    found = report.contest
    assert found is not None
    written, scores = next(iter(found.scores.items()))
    verdict, goal = by_metric.verdict(found), f"{comparative(found.goal)} is better"
    asked = "" if scores.selection_parts is None else f"; mean over {scores.selection_parts} parts"
    tiles = [Tile(f"{found.metric} to choose by", scores.selection, f"{goal}{asked}")]
    if scores.heldout is not None:
        held = Tile(f"held-out {found.metric}", scores.heldout, interval_of(scores.interval))
        tiles.insert(0, held)
    if found.gained:
        note = f"{found.gained.over}; {interval_of(found.gained.interval)}"
        has_gained = written != found.incumbent  # else nothing was chosen by the metric
        tiles.append(Tile("gained over" if has_gained else "ahead of", found.gained.by, note))
    tiles += [
        Tile("evaluations", found.evaluations, f"budget {found.budget}"),
        Tile("checkpoints", report.K, f"of {report.k:,}"),
        Tile("took", duration(report.cost.seconds.total), report.device),
    ]
    seen = by_metric.sheet(report).parts[0][1]
    assert isinstance(seen, list)
    marks = ["chosen" if place == 0 else None for place in range(len(seen))]
    sections = [
        *section(
            f"By {found.metric}, on parts that nothing was chosen by",
            Words([upper(said) for said in (by_metric.heldout(found), *by_metric.failed(found))]),
            *drawings(report, "scores"),
            Table(f"{found.metric}, held out and to choose by", seen, marks=marks),
        ),
        *section(
            "Was the best one lucky?",
            Words([upper(verdict), upper(by_metric.effort(found))]),
            *drawings(report, "entries"),
            Table("All that competed", by_metric.entries(found), folded=True),
        ),
        *section(
            "Which checkpoints, and how much of each",
            Words([upper(sentences.taken(report))]),
            *drawings(report, "weights"),
            *checkpoints(report.candidates, report.left_out),
        ),
        *standing_of(report.standing),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=by_metric.headline(found),
        answer=f"{file_of(report.output) or 'the average'} is `{written}`; {verdict}",
        sections=sections,
        tiles=tiles,
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )
