"""A chapter for each kind of report; that of `select` is in `selection`."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final

from sewa_cli.direction import loss_of
from sewa_cli.present import kind_of, say, sentences, tables
from sewa_cli.present.page.contest import contest
from sewa_cli.present.page.parts import Chapter, Part, Section, Table, Tile, Words
from sewa_cli.present.page.selection import select
from sewa_cli.present.page.shared import (
    MOST_DRAWN,
    WAYS,
    about,
    again,
    before_colon,
    checkpoints,
    cost,
    drawings,
    file_of,
    interval_of,
    section,
    sheets,
    standing_of,
    upper,
)
from sewa_cli.present.sheet import Rows
from sewa_cli.text import duration, examples, number, size, with_K

if TYPE_CHECKING:
    from sewa_cli.report.average import AverageReport
    from sewa_cli.report.compare import Comparison
    from sewa_cli.report.evaluate import Evaluation
    from sewa_cli.report.inspect import Inspection
    from sewa_cli.report.shared import Head


def chapter(report: Head, name: str | None = None) -> Chapter:
    """`name`: of the report's file, where it has one."""
    return CHAPTERS.get(kind_of(report), other)(report, name)


def compare(report: Comparison, name: str | None) -> Chapter:
    said = sentences.compare(report)[0]
    best = None if report.best is None else report.rows[report.best]
    tiles = []
    if best is not None:
        named = with_K(best.method, best.K)
        value, interval = best.held
        tiles.append(Tile(sentences.measured(report), value, interval_of(interval)))
        tiles.append(Tile("by", named, f"{best.size} of {report.k} checkpoints"))
        ties = sum(row.mark == "tie" for row in report.rows)
        tiles.append(Tile("cannot be told apart", f"{ties} of {len(report.rows) - 1}", "others"))
    tiles.append(Tile("averages evaluated", report.averages_evaluated, _rows_of(report)))
    tiles.append(Tile("took", duration(report.cost.seconds.total), report.device))
    headline = "No winner"
    if best is not None and not said.startswith("no winner"):
        name_of_best = with_K(best.method, best.K)
        has = f"has the {sentences.measured(report)}"
        headline = f"{name_of_best} {'wins' if report.winner else has}"
    found = tables.compare(report).parts[0][1]
    assert isinstance(found, list)
    marks = [row.mark for row in report.rows]
    is_held = report.heldout_rows is not None or report.judged is not None
    held = [_only_marks(report)] if is_held else []
    if failed := sentences.failed(report):
        held.append(Words([upper(said) for said in failed]))
    drawn, fewer = _lowest_rows(report)
    sections = [
        *section(
            "Every method at every K",
            *drawings(drawn, "scores"),
            *fewer,
            *held,
            Table("Losses, metrics and cost", found, marks=marks),
        ),
        *section(
            "Which checkpoints",
            *drawings(drawn, "weights"),
            *checkpoints(report.candidates, report.left_out),
        ),
        *section("Does choosing over-fit?", *drawings(drawn, "overfit")),
        *standing_of(report.standing),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=headline,
        answer=said.removeprefix("no winner: "),
        sections=sections,
        tiles=tiles,
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )


def _lowest_rows(report: Comparison) -> tuple[Comparison, list[Words]]:
    """As many as a picture shows, and what is said where that is not all."""
    count, most = len(report.rows), MOST_DRAWN["rows"]
    if count <= most:
        return report, []
    heldout = report.heldout_rows is not None

    def loss(place: int) -> float:
        row = report.rows[place]
        found = row.heldout_loss if heldout else row.selection_loss
        if report.judged and row.held[0] is not None:
            found = loss_of(row.held[0], report.judged.goal)
        return inf if found is None or place == report.best else found

    by_loss = sorted(range(count), key=loss)[: most - 1]
    kept = sorted({*by_loss, by_loss[0] if report.best is None else report.best})
    best = None if report.best is None else kept.index(report.best)
    rows = [report.rows[place] for place in kept]
    said = f"Of {count:,} rows the {len(rows)} with the lowest losses are drawn."
    return report.model_copy(update={"rows": rows, "best": best}), [Words([said])]


def _only_marks(report: Comparison) -> Words:
    unit = report.unit or "rows"
    return Words(
        [
            f"★ has the {sentences.measured(report)}; a tie (=) cannot be told apart from it by a "
            f"paired bootstrap over {unit} that holds for all pairs at once. Bars are each row's "
            "own interval: they overlap even where the difference is certain."
        ]
    )


def inspect(report: Inspection, name: str | None) -> Chapter:
    found = report.checkpoints
    tiles = [Tile("checkpoints", len(found)), Tile("parameters", report.parameters)]
    if report.motion is not None:
        run = report.motion.run
        tiles.append(Tile("explained by a line", run.trend, "1: steady motion, 0: noise"))
        tiles.append(Tile("mean cosine of steps", run.cosine, "1: straight, −0.5: noise"))
    tiles.append(Tile("read", size(report.bytes_read)))
    titles = ("Each checkpoint", WAYS)
    facts, each, *ways = sheets(tables.inspect(report), titles)
    return Chapter(
        headline=before_colon(report.explanation),
        answer=upper(report.explanation.partition(": ")[2] or report.explanation),
        sections=[
            *section("Where the run stands", *drawings(report, "run"), *ways),
            *section("What is there", facts, each),
            again(report, name),
        ],
        tiles=tiles,
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )


def evaluate(report: Evaluation, name: str | None) -> Chapter:
    measure = "selection_loss" if report.heldout_rows is None else "heldout_loss"
    word = tables.LOSS[measure]
    losses = [getattr(one, measure) for one in report.files]
    known = sorted((i for i, loss in enumerate(losses) if loss is not None), key=losses.__getitem__)
    headline, answer = f"No finite {word}", f"none of {len(report.files)} files has a finite {word}"
    rows_used = report.heldout_rows or report.selection_rows
    tiles = [Tile("files", len(report.files))]
    if known:
        best = report.files[known[0]]
        headline = f"{file_of(best.path)} has the lowest {word}"
        answer = f"{number(losses[known[0]])} on {rows_used:,} rows"
        if len(known) > 1:
            after = report.files[known[1]].path
            answer += f"; next comes {after} with {number(losses[known[1]])}"
            answer += "; whether a difference is more than luck, sewa compare says"
        tiles += [Tile(f"lowest {word}", losses[known[0]], file_of(best.path) or "")]
        tiles += [Tile(key, value, "of that file") for key, value in (best.metrics or {}).items()]
    tiles.append(Tile("rows", rows_used))
    rows: Rows = [
        {tables.LOSS.get(key, key): value for key, value in row.items()}
        for row in tables.evaluate(report).rows
    ]
    marks = ["best" if place in known[:1] else None for place in range(len(rows))]
    table = Table("Losses and metrics", rows, folded=len(rows) > 60, marks=marks)
    return Chapter(
        headline=headline,
        answer=answer,
        sections=[
            *section("Each file as it is", *drawings(report, "scores"), table),
            again(report, name),
        ],
        tiles=tiles[:6],
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )


def average(report: AverageReport, name: str | None) -> Chapter:
    count = len(report.recipe.sources)
    written = file_of(report.output) or "an average"
    return Chapter(
        headline=f"An average of {count} checkpoints",
        answer=f"{written} averages {count} checkpoints; neither model nor data were asked",
        sections=[
            *section("Which checkpoints", *drawings(report, "weights")),
            again(report, name),
        ],
        tiles=[Tile("checkpoints", count), Tile("tensors", len(report.recipe.tensors))],
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )


def other(report: Head, name: str | None) -> Chapter:
    """Of any other kind: what the terminal says."""
    said = say(report) or [f"the report of sewa {report.kind}"]
    parts: list[Part] = sheets(getattr(tables, report.kind)(report))
    return Chapter(
        headline=before_colon(said[0]),
        answer="; ".join(said),
        sections=[Section("In numbers", parts), again(report, name)],
        warnings=report.warnings,
        about=about(report),
        command=report.command,
    )


def _rows_of(report: Comparison) -> str:
    own, heldout = report.selection_rows, report.heldout_rows
    said = examples(own, report.selection_groups, " selection rows")
    held = "" if heldout is None else f", {examples(heldout, report.heldout_groups)} held out"
    return said + held


CHAPTERS: Final[dict[str, Callable[..., Chapter]]] = {
    "select": select,
    "contest": contest,
    "compare": compare,
    "inspect": inspect,
    "evaluate": evaluate,
    "average": average,
}
