"""The view of `select`: what was gained over the last checkpoint, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sewa_cli.present.charts import Chart, Dots, ends_of, rows_panel
from sewa_cli.present.parts import (
    and_last,
    cost_section,
    curves,
    describe_lora,
    difference,
    recalled,
    seconds,
    section,
    standing,
    standing_section,
    taken,
    than_last,
    upper,
    weights_chart,
    weights_section,
    wrote,
)
from sewa_cli.present.view import (
    Cell,
    Picture,
    Rows,
    Section,
    Table,
    View,
    Words,
    metrics_of,
    titled,
)
from sewa_cli.present.views.findings import (
    Shown,
    compared_scores,
    expected,
    overfits,
    show_findings,
)
from sewa_cli.report.findings import Expected
from sewa_cli.text import examples, number, with_K

if TYPE_CHECKING:
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Measured


def view(report: Report) -> View:
    expects = report.heldout_rows is None and report.find(Expected) is not None
    first, *more = scores(report)
    judged = verdict(report)
    caveat = f"{expected(report)}; {judged}" if expects else judged
    rows, seen = _rows(report)
    found = show_findings(report)
    charts = [part.chart for part in found.parts if isinstance(part, Picture)]
    plots = [weights_chart(report), *charts[:1]]
    return View(
        headline=headline(report),
        caveat=f"{report.K} of {report.k} checkpoints averaged; {caveat}",
        says=[
            *(first, *more, *_best_baseline(report), judged),
            *(*wrote(report.output), *recalled(report.cost)),
        ],
        details=list(_details(report, found)),
        rows=rows,
        tables=[Table("", seen)],
        sections=[
            *section(
                "Against baselines", Picture(_scores_chart(report)), _scores_table(report, seen)
            ),
            *weights_section(report, *found.weights),
            *section("How the loss changes", *found.parts, _baselines_table(report)),
            *section("What the solver found", Words(found.own) if found.own else None),
            *_overfit_section(report),
            *standing_section(report.standing),
            cost_section(report.cost, report.placement),
        ],
        plot=Chart("", "", [panel for chart in plots for panel in chart.panels]),
        numbers=dict(_numbers(report)),
        curves=curves(report),
        names={"written": report.written, "baseline": next(iter(report.references), None)},
    )


def headline(report: Report) -> str:
    expects = report.find(Expected)
    if report.heldout_rows is None and expects and not report.instead_of:
        return f"Expected loss on new data {number(expects.loss, 3)}"
    name, own, last = _losses(report)
    return f"{upper(name)} {number(own, 3)}{than_last(own, last)}"


def scores(report: Report) -> list[str]:
    name, own, last = _losses(report)
    said = [f"{name} {number(own, 3)}{and_last(own, last)}"]
    if report.heldout_rows is None and report.find(Expected):
        said = [expected(report)]
    before = report.references["last"].metrics or {}
    for metric, value in (report.average.metrics or {}).items():
        compared = and_last(value, before.get(metric), is_loss=False)
        said.append(f"{metric} {number(value, 3)}{compared}")
    return said


def _losses(report: Report) -> tuple[str, float | None, float | None]:
    """Name a loss, and return that of what was written and that of the last checkpoint."""
    own, last = report.average, report.references["last"]
    if report.heldout_rows is None:
        return "selection loss", own.selection_loss, last.selection_loss
    return "held-out loss", own.heldout_loss, last.heldout_loss


def _best_baseline(report: Report) -> list[str]:
    name, found = next(iter(report.references.items()))
    if name == report.written:
        return []
    loss = f"selection loss {number(found.selection_loss, 3)}"
    if report.heldout_rows is not None:
        loss = f"held-out loss {number(found.heldout_loss, 3)}"
    metrics = [f"{metric} {number(value, 3)}" for metric, value in (found.metrics or {}).items()]
    return [f"best baseline: {', '.join([name, loss, *metrics])}"]


def verdict(report: Report) -> str:
    found, chosen = report.verdict, report.instead_of or report.written
    instead = f"; `{report.written}` was written instead" if report.instead_of else ""
    if found.kind == "no held-out data":
        return "no held-out data: define heldout_data in the task, or try --guard 0.2"
    if found.kind == "not finite":
        return f"the held-out loss of what was chosen is NaN or Inf{instead}"
    if found.kind == "baseline not finite":
        return f"the held-out loss of the best baseline (`{found.baseline}`) is NaN or Inf{instead}"
    if found.kind == "baseline" and found.baseline is not None:
        return f"no gain over the best baseline: the choice is `{found.baseline}` itself{instead}"
    if found.kind == "baseline":
        return f"no gain over the best baseline: `{chosen}` was chosen, a baseline{instead}"
    said = f"vs best baseline ({found.baseline}): "
    said += difference(found.difference or 0.0, found.interval)
    if found.kind == "too few":
        units = "groups" if report.heldout_groups else "batches"
        units = "examples" if found.n == report.heldout_rows else units
        said += f"; too few {units} for a confidence interval"
    # another baseline that anybody would have tried
    lower = [b for b in found.beaten_by if b.name != found.baseline and b.difference is not None]
    sure = [b for b in lower if b.interval is not None and not b.interval.has_zero()]
    for other in (sure or (lower if found.kind == "better" else []))[:1]:
        said += f"; vs {other.name}: {difference(other.difference or 0.0, other.interval)}"
    return f"{said}{instead}"


def _details(report: Report, findings: Shown) -> Iterator[str]:
    yield from findings.choice
    yield taken(report)
    yield from findings.weights
    yield from standing(report.standing)
    yield from findings.details
    if report.batchnorm and report.batchnorm.data:
        found = report.batchnorm
        layers = f"{found.layers} layer{'' if found.layers == 1 else 's'}"
        yield f"BatchNorm statistics of {layers} recomputed on {found.data} ({found.rows} examples)"
    if report.lora and report.lora.mode == "merged":
        yield describe_lora(report.lora)
    yield from seconds(report)
    if report.find(Expected) and report.heldout_rows is not None:
        yield expected(report)


def _rows(report: Report) -> tuple[Rows, Rows]:
    compared, best = compared_scores(report), next(iter(report.references), None)
    titles = {"uniform": f"uniform (all {report.k})"}
    if best is not None:
        titles[best] = f"{titles.get(best, best)} (best baseline)"
    expects: dict[str | None, float] = {}
    if expected := report.find(Expected):
        if expected.by is not None:
            expects[best] = expected.loss + expected.by
        own = report.instead_of or report.written
        expects[own] = expected.loss
    selection, held = examples(report.selection_rows, report.selection_groups), None
    if report.heldout_rows is not None:
        held = f"held-out loss ({examples(report.heldout_rows, report.heldout_groups)})"
    columns = {
        "selection_loss": f"selection loss ({selection})",
        "expected_loss": "expected loss",
        "heldout_loss": held,
    }
    rows: Rows = []
    for name, found in compared.items():
        row: dict[str, Cell] = {"average": name, "selection_loss": found.selection_loss}
        if expects:
            row["expected_loss"] = expects.get(name)
        row["heldout_loss"] = found.heldout_loss
        rows.append({**row, **metrics_of(found.metrics, {*row, *columns.values()})})
    seen = [{**row, "average": titles.get(str(row["average"]), row["average"])} for row in rows]
    return rows, titled(seen, columns)


def _scores_table(report: Report, seen: Rows) -> Table:
    """Mark the row with the lowest held-out loss, and the row of what was written."""
    compared = compared_scores(report)
    losses = {n: s.heldout_loss for n, s in compared.items() if s.heldout_loss is not None}
    lowest = min(losses.values(), default=None)
    marks = ["chosen" if name == report.written else None for name in compared]
    for place, name in enumerate(compared):
        if name in losses and losses[name] == lowest:
            marks[place] = "best"
    marked = "; marked by the lowest held-out loss" if losses else ""
    return Table(f"Losses and metrics{marked}", seen, False, marks)


def _scores_chart(report: Report) -> Chart:
    compared = compared_scores(report)
    found = list(compared.values())
    dots = [Dots("selection", [one.selection_loss for one in found], is_hollow=True)]
    expects = report.find(Expected)
    if expects and next(iter(compared)) not in report.references:
        loss, error = expects.loss, expects.error
        nothing = [None] * (len(found) - 1)
        dots.append(
            Dots("expected", [loss, *nothing], intervals=[ends_of(loss, error)], marker="D")
        )
    if report.heldout_rows is not None:
        dots.append(Dots("held-out", [one.heldout_loss for one in found]))
    return Chart(
        "Loss of the average and of baselines",
        "A row for each average with its selection, expected and held-out loss, as in the table.",
        [rows_panel(list(compared), dots, "loss")],
    )


def _baselines_table(report: Report) -> Table | None:
    rows: Rows = [
        {"average": with_K(one.name, one.K), "selection loss": one.selection_loss}
        for one in report.simple
    ]
    title = f"All {len(rows)} baselines, by selection loss"
    if report.simple_rows is not None:
        title += f" on {report.simple_rows:,} of {report.selection_rows:,} examples"
    return Table(title, rows, is_folded=True) if rows else None


def _overfit_section(report: Report) -> list[Section]:
    lines = [overfits(report)]
    if report.find(Expected):
        lines.append(expected(report))
    for better in report.verdict.beaten_by:
        by = ""
        if better.difference is not None:
            by = f": {difference(better.difference, better.interval)}"
        lines.append(f"{better.name} has a lower held-out loss, {number(better.score, 3)}{by}")
    return section("Does it overfit?", Words(lines))


def _numbers(report: Report) -> Iterator[tuple[str, float | None]]:
    measure = "selection_loss" if report.heldout_rows is None else "heldout_loss"
    yield "selection_loss", report.average.selection_loss
    yield "heldout_loss", report.average.heldout_loss
    expects = report.find(Expected)
    yield "expected_loss", expects.loss if expects else None
    yield "vs_baseline", report.verdict.difference
    yield "checkpoints", report.K
    yield from _metrics(report.average, "")
    others = {"baseline": next(iter(report.references.values()), None)}
    others |= {name: report.references.get(name) for name in ("last", "uniform")}
    for name, found in others.items():
        if found is not None:
            yield f"{name}_loss", getattr(found, measure)
            yield from _metrics(found, f"{name}_")


def _metrics(found: Measured, before: str) -> Iterator[tuple[str, float | None]]:
    yield from ((f"metrics/{before}{name}", value) for name, value in (found.metrics or {}).items())
