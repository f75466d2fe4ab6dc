"""The view of `inspect`: what checkpoints are there, and how the run moves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sewa_cli.present.charts import (
    Chart,
    Panel,
    Series,
    drawable,
    logged_panels,
    name_of,
    places_of,
)
from sewa_cli.present.parts import MOTION, motion_rows, section
from sewa_cli.present.view import Facts, Picture, Rows, Table, View, Words, metrics_of
from sewa_cli.present.words import upper
from sewa_cli.text import few, number, size

if TYPE_CHECKING:
    from sewa_cli.report.kinds import Found, Inspection


def view(report: Inspection) -> View:
    found = report.checkpoints
    rows, seen = _rows(report)
    facts, chart = Facts(_facts(report)), _chart(report)
    moved = [] if report.motion is None else [Table(MOTION, motion_rows(report.motion))]
    logged = logged_panels([one.step for one in found], [one.logged for one in found])
    trained = Chart("What the trainer logged", "The logged losses by step.", logged)
    curves = {
        name: [
            (i if one.step is None else one.step, getattr(one, name)) for i, one in enumerate(found)
        ]
        for name in ("to_last", "to_mean", "length", "cosine")
    }
    return View(
        headline=f"The run is {report.verdict}",
        caveat=upper(report.explanation),
        rows=rows,
        tables=[facts, Table("", seen), *moved, Words([report.explanation])],
        sections=[
            *section(
                "Where the run stands",
                Picture(chart),
                Picture(trained) if logged else None,
                *moved,
            ),
            *section(
                "What is there", facts, Table("Each checkpoint", seen, is_folded=len(seen) > 60)
            ),
        ],
        plot=chart,
        curves=curves,
    )


def _rows(report: Inspection) -> tuple[Rows, Rows]:
    """Return a row for each checkpoint: for programs, and for people."""
    found = report.checkpoints
    losses = dict.fromkeys(name for one in found for name in one.logged if "loss" in name)
    rows: Rows = []
    seen: Rows = []
    for one in found:
        twin = None if one.same_as is None else found[one.same_as]
        cells = one.model_dump(exclude={"logged", "nonfinite", "same_as"})
        cells |= {"nonfinite": len(one.nonfinite), "same_as": twin and twin.path}
        rows.append({**cells, **metrics_of(one.logged, cells)})
        notes = [f"NaN or Inf in {few(one.nonfinite, 2)}"] if one.nonfinite else []
        notes += [f"same as {_name(twin)}"] if twin else []
        seen.append(
            {
                "step": one.step,
                **{name: one.logged.get(name) for name in losses},
                "from last": one.to_last,
                "from mean": one.to_mean,
                "moved": one.length,
                "cosine": None if one.cosine is None else round(one.cosine, 3),
                "size": size(one.size),
                "file": one.path,
                "note": "; ".join(notes),
            }
        )
    return rows, seen


def _facts(report: Inspection) -> dict[str, str]:
    found = report.checkpoints
    first, last = found[0].step, found[-1].step
    if first is None:
        steps = "without steps"
    elif first == last:
        steps = f"step {first}"
    else:
        spacing = f"every {report.spacing}" if report.spacing else "unevenly spaced"
        steps = f"steps {first} to {last}, {spacing}"
    sizes = [one.size for one in found]
    each = " to ".join(dict.fromkeys([size(min(sizes)), size(max(sizes))]))
    gaps = [
        f"{gap.after} to {gap.before}" + (f" ({gap.missing} missing)" if gap.missing else "")
        for gap in report.gaps
    ]
    return {
        "checkpoints": f"{len(found)}, {steps}",
        "gaps": few(gaps, 5) or "none",
        "size": f"{size(sum(sizes))}, {each} each",
        "tensors": f"{report.tensors:,}",
        "parameters": f"{report.parameters:,}",
        "dtypes": ", ".join(f"{word} ({n:,})" for word, n in report.dtypes.items()),
        "duplicates": few([_name(one) for one in found if one.same_as is not None], 5) or "none",
        "NaN or Inf": few([_name(one) for one in found if one.nonfinite], 5) or "none",
    }


def _name(one: Found) -> str:
    return one.path if one.step is None else f"step {one.step}"


def _chart(report: Inspection) -> Chart:
    rows = report.checkpoints
    places, x_label = places_of([row.step for row in rows])
    names = [name_of(row.step, i) for i, row in enumerate(rows)]
    size = 3.5 if len(places) <= 200 else 1.5  # an isolated point is a line without length

    def line(name: str, values: list[float | None], dashes: str, *, is_hollow: bool) -> Series:
        hints = [
            f"{at}, {name or 'cosine'} {number(value)}"
            for at, value in zip(names, values, strict=True)
        ]
        known = [drawable(value) for value in values]
        look = Series(name, places, known, dashes, "o", size=size, hints=hints)
        return replace(look, is_hollow=is_hollow)

    away = [
        line("from the last", [row.to_last for row in rows], "-", is_hollow=False),
        line("from the mean", [row.to_mean for row in rows], "--", is_hollow=True),
    ]
    if broken := [x for x, row in zip(places, rows, strict=True) if row.to_last is None]:
        away.append(Series("left out", broken, [0.0] * len(broken), marker="x"))
    cosine = line("", [row.cosine for row in rows], "-", is_hollow=False)
    levels = {"straight line": 1.0, "random walk": 0.0, "noise around a point": -0.5}
    return Chart(
        "Distances along the run",
        "Above, each checkpoint's distance from the last and from the mean; below, the cosine of "
        f"the steps before and after it. {report.explanation}.",
        [
            Panel(away, x_label, "L2 distance of the weights", y_limits=(0.0, None), height=3.2),
            Panel([cosine], x_label, "cosine of the steps", levels, y_limits=(-1.05, 1.05)),
        ],
    )
