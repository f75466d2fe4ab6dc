"""A chapter for each kind of report, by the function that is named like it."""

from __future__ import annotations

from math import inf
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from sewa_cli.present import contest as by_metric
from sewa_cli.present import kind_of, say, sentences, tables
from sewa_cli.present.page.parts import Chapter, Part, Section, Table, Tile, Words
from sewa_cli.present.page.shared import (
    MOST_DRAWN,
    again,
    checkpoints,
    cost,
    drawings,
    section,
    sheets,
    when,
)
from sewa_cli.present.sheet import Cell, Rows
from sewa_cli.present.tables import percent
from sewa_cli.text import duration, number, size, with_K

if TYPE_CHECKING:
    from sewa_cli.report.average import AverageReport
    from sewa_cli.report.compare import Comparison
    from sewa_cli.report.evaluate import Evaluation
    from sewa_cli.report.inspect import Inspection
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Head, Interval
    from sewa_cli.report.standing import Standing
    from sewa_cli.report.windows import Windows

WAYS: Final = "Beside three simple ways of moving"


def chapter(report: Head, name: str | None = None) -> Chapter:
    """`name`: of the report's file, where it has one."""
    make = globals().get(kind_of(report), other)
    found: Chapter = make(report, name)
    return found


def select(report: Report, name: str | None) -> Chapter:
    verdict = sentences.verdict(report)
    written = _file(report.output) or "the average"
    made = "weighs" if report.blend and not report.instead_of else "is the mean of"
    what = f"{written} {made} {report.K} of {report.k} checkpoints"
    best, scores = next(iter(report.references.items()))
    tiles = []
    if report.heldout_rows is not None:
        tiles += [
            Tile("held-out loss", report.average.heldout_loss, f"{report.heldout_rows:,} rows"),
            Tile("best simple average", scores.heldout_loss, best),
        ]
    if report.gained:
        tiles.append(Tile("gained", report.gained.by, _interval(report.gained.interval)))
    else:
        tiles.append(Tile("selection loss", report.average.selection_loss, "of what was written"))
    if report.expected:
        error = f"± {1.96 * report.expected.error:.2g} on new rows"
        tiles.append(Tile("expected loss", report.expected.loss, error))
    tiles.append(Tile("checkpoints", report.K, f"of {report.k:,}{_worth(report)}"))
    tiles.append(Tile("took", duration(report.cost.seconds.total), report.device))

    overfit = [_upper(sentences.expected(report))] if report.expected else []
    for better in report.beaten_by:
        said = f"{better.name} has a lower held-out loss, {number(better.heldout_loss)}"
        if better.by is not None:
            sure = f" ({_interval(better.interval)})" if better.interval else ""
            said += f": {number(better.by)}{sure} below what was chosen"
        overfit.append(said)
    if report.labels == "noise":
        overfit.append("Mixed-up rows fit as well: the labels say nothing")
    budget = [Words([_upper(sentences.budget(report.budget))])] if report.budget else []
    sheet = tables.select(report)
    seen = sheet.parts[0][1]
    assert isinstance(seen, list)
    table = Table("Losses and metrics", seen, marks=_lowest(sheet.rows, report.written))
    sections = [
        *section(
            "Against simple averages",
            *drawings(report, "scores"),
            table,
        ),
        *section(
            "Which checkpoints, and how much of each",
            Words([_upper(sentences.taken(report))]),
            *drawings(report, "weights"),
            *checkpoints(report.candidates, report.left_out),
        ),
        *section("How the loss changes", *drawings(report, "loss"), *budget, _simple(report)),
        *section("Does it over-fit?", Words(overfit) if overfit else None),
        *section(
            "Would other rows choose alike?",
            Words([_upper(sentences.stability(report))]) if report.stability else None,
            *drawings(report, "stability"),
        ),
        *_standing(report.standing),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=_first(verdict),
        answer=f"{what}; {verdict}",
        sections=sections,
        tiles=tiles,
        warnings=report.warnings,
        about=_about(report),
        command=report.command,
    )


def _standing(found: Standing | None) -> list[Section]:
    if found is None:
        return []
    said = [_upper(sentence) for sentence in sentences.standing(found)]
    rows = tables.ways(found.motion)
    title = f"{WAYS}, by {found.weights:,} weights of each checkpoint"
    return section("Where the run stands", Words(said), Table(title, rows))


def contest(report: Report, name: str | None) -> Chapter:
    """Of a choice by a metric."""
    found = report.contest
    assert found is not None
    written, scores = next(iter(found.scores.items()))
    verdict, best = by_metric.verdict(found), f"{found.goal}imise"
    headline = "Nobody is crowned" if found.crowned is False else f"{written} was taken"
    tiles = [Tile(f"{found.metric} to choose by", scores.selection, f"to {best}")]
    if scores.heldout is not None:
        tiles.insert(
            0, Tile(f"held-out {found.metric}", scores.heldout, _interval(scores.interval))
        )
    if found.gained:
        note = f"over {found.gained.over}; {_interval(found.gained.interval)}"
        tiles.append(Tile("gained", found.gained.by, note))
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
            Words([_upper(by_metric.heldout(found))]),
            *drawings(report, "scores"),
            Table(f"{found.metric}, held out and to choose by", seen, marks=marks),
        ),
        *section(
            "Was the best one lucky?",
            Words([_upper(verdict), _upper(by_metric.effort(found))]),
            *drawings(report, "entries"),
            Table("All that competed", by_metric.entries(found), folded=True),
        ),
        *section(
            "Which checkpoints, and how much of each",
            Words([_upper(sentences.taken(report))]),
            *drawings(report, "weights"),
            *checkpoints(report.candidates, report.left_out),
        ),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=headline,
        answer=f"{_file(report.output) or 'the average'} is `{written}`; {verdict}",
        sections=sections,
        tiles=tiles,
        warnings=report.warnings,
        about=_about(report),
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
    return f", worth {report.blend.effective:.3g} equal ones" if report.blend else ""


def compare(report: Comparison, name: str | None) -> Chapter:
    said = sentences.compare(report)[0]
    best = None if report.best is None else report.rows[report.best]
    tiles = []
    if best is not None:
        named = with_K(best.method, best.K)
        value, interval = best.held
        tiles.append(Tile(sentences.measured(report), value, _interval(interval)))
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
        *_standing(report.standing),
        cost(report.cost, report.placement),
        again(report, name),
    ]
    return Chapter(
        headline=headline,
        answer=said.removeprefix("no winner: "),
        sections=sections,
        tiles=tiles,
        warnings=report.warnings,
        about=_about(report),
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
            found = row.held[0] if report.judged.goal == "min" else -row.held[0]
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
            f"paired bootstrap over {unit} that holds for all pairs at once."
        ]
    )


def windows(report: Windows, name: str | None) -> Chapter:
    said = say(report) or ["one window has nothing to be compared with"]
    parts = sheets(tables.windows(report))
    reached = [one for one in report.reaches if one.at is not None and one.method != "last"]
    first = min(reached, key=lambda one: (one.at, one.loss or 0.0), default=None)
    tiles = [Tile("the last checkpoint's level", report.level.value, tables.level(report))]
    if first is not None:
        share = "" if first.share is None else f"{percent(first.share)} of the training"
        tiles.append(
            Tile("first reached after", first.at, f"{with_K(first.method, first.K)} {share}")
        )
    tiles.append(Tile("windows", len(report.windows), f"of {report.size} checkpoints"))
    tiles.append(Tile("took", duration(report.cost.seconds.total), report.device))
    saves_nothing = any(one.endswith("averaging saves no training here") for one in said)
    headline = "Averaging saves no training here" if saves_nothing else said[0].partition(": ")[0]
    return Chapter(
        headline=headline,
        answer="; ".join(said),  # what the first is worth, the others say
        sections=[
            *section("Along the run", *drawings(report, "scores")),
            *section("In numbers", *parts),
            *section("Which checkpoints", *checkpoints(report.candidates, report.left_out)),
            cost(report.cost),
            again(report, name),
        ],
        tiles=tiles,
        warnings=report.warnings,
        about=_about(report),
        command=report.command,
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
        headline=_first(report.explanation),
        answer=_upper(report.explanation.partition(": ")[2] or report.explanation),
        sections=[
            *section("Where the run stands", *drawings(report, "run"), *ways),
            *section("What is there", facts, each),
            again(report, name),
        ],
        tiles=tiles,
        warnings=report.warnings,
        about=_about(report),
        command=report.command,
    )


def evaluate(report: Evaluation, name: str | None) -> Chapter:
    measure = "selection_loss" if report.heldout_rows is None else "heldout_loss"
    word = tables.LOSS[measure]
    known = [one for one in report.files if getattr(one, measure) is not None]
    headline, answer = f"No finite {word}", f"none of {len(report.files)} files has a finite {word}"
    tiles = [Tile("files", len(report.files))]
    if known:
        best = min(known, key=lambda one: float(getattr(one, measure)))
        loss = getattr(best, measure)
        headline = f"{_file(best.path)} has the lowest {word}"
        answer = f"{best.path} has the lowest {word} of {len(report.files)}: {number(loss)}"
        tiles += [Tile(f"lowest {word}", loss, _file(best.path) or "")]
        tiles += [Tile(key, value, "of that file") for key, value in (best.metrics or {}).items()]
    tiles.append(Tile("rows", report.heldout_rows or report.selection_rows))
    table = Table("Losses and metrics", tables.evaluate(report).rows, folded=len(report.files) > 60)
    return Chapter(
        headline=headline,
        answer=answer,
        sections=[
            *section("Each file as it is", *drawings(report, "scores"), table),
            again(report, name),
        ],
        tiles=tiles[:6],
        warnings=report.warnings,
        about=_about(report),
        command=report.command,
    )


def average(report: AverageReport, name: str | None) -> Chapter:
    count = len(report.recipe.sources)
    written = _file(report.output) or "an average"
    return Chapter(
        headline=f"An average of {count} checkpoints",
        answer=f"{written} averages {count} checkpoints; neither model nor data were asked",
        sections=[again(report, name)],
        tiles=[Tile("checkpoints", count), Tile("tensors", len(report.recipe.tensors))],
        warnings=report.warnings,
        about=_about(report),
        command=report.command,
    )


def other(report: Head, name: str | None) -> Chapter:
    """Of any other kind: what the terminal says."""
    said = say(report) or [f"the report of sewa {report.kind}"]
    parts: list[Part] = sheets(getattr(tables, report.kind)(report))
    return Chapter(
        headline=_first(said[0]),
        answer="; ".join(said),
        sections=[Section("In numbers", parts), again(report, name)],
        warnings=report.warnings,
        about=_about(report),
        command=report.command,
    )


def _about(report: Head) -> str:
    return f"sewa {report.kind}, {when(report)}"


def _first(sentence: str) -> str:
    """What stands before the colon, as a heading."""
    return _upper(sentence.partition(": ")[0])  # a method's options have one without a space


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _file(path: str | None) -> str | None:
    return None if path in (None, "-") else PurePath(path or "").name


def _interval(found: Interval | None) -> str:
    return "" if found is None else f"95 %: {number(found.low)} .. {number(found.high)}"


def _rows_of(report: Comparison) -> str:
    heldout: Cell = "" if report.heldout_rows is None else f", {report.heldout_rows:,} held out"
    return f"{report.selection_rows:,} selection rows{heldout}"
