"""Several reports side by side: seeds, solvers, settings; means and intervals over runs alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import PurePath
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present.page.parts import Chapter, Drawing, Part, Section, Table, Tile, Words
from sewa_cli.present.plots import Picture, panels
from sewa_cli.present.plots.dots import Series, draw_dots
from sewa_cli.text import number, with_K

if TYPE_CHECKING:
    from sewa_cli.present.tables import Cell, Rows
    from sewa_cli.report.shared import Head

# what may differ between runs of one kind: which run it was, and where its results went
_RUN: Final = {
    "seed",
    "checkpoints",
    "output",
    "report",
    "cache",
    "memory",
    "device",
    "args",
    "task",
}
# 97.5 % of Student's t with 1, 2, … degrees of freedom; from 30 on it is the normal's within 4 %
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045,
)  # fmt: skip


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over runs, and half of its 95 % interval by Student's t; None: one run has none."""
    if len(values) < 2:
        return fmean(values), None
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    return fmean(values), t * stdev(values) / sqrt(len(values))


def side_by_side(reports: Sequence[Head], names: Sequence[str | None]) -> Chapter:
    """One table of all runs; for each group of runs of one kind, means with intervals."""
    titles = _titles(names)
    groups: dict[str, list[int]] = {}
    for i, report in enumerate(reports):
        groups.setdefault(_settings(report), []).append(i)
    apart = _apart([reports[members[0]] for members in groups.values()])
    sections = [Section("Run by run", [Table("Runs", _runs(reports, titles))])]
    for label, members in zip(apart, groups.values(), strict=True):
        if len(members) > 1:
            found = [reports[i] for i in members]
            parts = _means(found, [titles[i] for i in members])
            title = f"Mean over {len(members)} runs of sewa {found[0].kind}"
            sections.append(Section(f"{title}, {label}" if label else title, parts))
    alike = max(map(len, groups.values()))
    kinds = ", ".join(dict.fromkeys(report.kind for report in reports))
    what = f"{len(reports)} reports of {kinds}"
    if len(groups) == 1:
        answer = f"{what}, all of one kind: their settings differ in nothing but the run itself"
    elif alike > 1:
        answer = f"{what}, in {len(groups)} groups of runs that are of one kind"
    else:
        answer = f"{what}, each of its own kind: no means are taken over different settings"
    return Chapter(
        headline=f"{len(reports)} runs side by side",
        answer=answer,
        sections=sections,
        tiles=_tiles(reports) if len(groups) == 1 else [],
        about="sewa report",
    )


def scores(report: Any) -> dict[str, float]:
    """What is compared between runs: held-out losses by average, or selection losses without."""
    measure = (
        "heldout_loss" if getattr(report, "heldout_rows", None) is not None else "selection_loss"
    )
    if report.kind == "select":
        chosen = report.learned if report.instead_of and report.learned else report.average
        # the best simple average is another one in another run: its place is what they share
        best, *others = report.references.items()
        rows = {"what was chosen": chosen, "best simple average": best[1], **dict(others)}
        if best[0] in ("last", "uniform"):
            rows[best[0]] = best[1]
    elif report.kind == "compare":
        rows = {with_K(row.method, row.K): row for row in report.rows}
    elif report.kind == "evaluate":
        rows = {PurePath(file.path).name: file for file in report.files}
    else:
        return {}
    found = {name: getattr(row, measure) for name, row in rows.items()}
    return {name: loss for name, loss in found.items() if loss is not None}


def _means(reports: Sequence[Head], titles: Sequence[str]) -> list[Part]:
    by_run = [scores(report) for report in reports]
    names = [name for name in by_run[0] if all(name in found for found in by_run)]
    if not names:
        return [Words(["there is no loss that all of them have"])]
    rows: Rows = []
    summary: dict[str, tuple[float, float | None]] = {}
    for name in names:
        mean, half = summary[name] = mean_interval([found[name] for found in by_run])
        row: dict[str, Cell] = {"average": name, "mean": mean}
        row |= {
            "low": None if half is None else mean - half,
            "high": None if half is None else mean + half,
        }
        rows.append({**row, **{t: found[name] for t, found in zip(titles, by_run, strict=True)}})
    best = min(names, key=lambda name: summary[name][0])
    word = "held-out" if getattr(reports[0], "heldout_rows", None) is not None else "selection"
    picture = Picture(
        f"Mean {word} loss over {len(reports)} runs",
        f"A row for each average: small dots are runs, large ones means with 95 % intervals. "
        f"{best} has the lowest mean, {number(summary[best][0])}.",
        lambda: panels(
            lambda axes: draw_dots(axes, names, _series(titles, names, by_run, summary)),
            height=1.0 + 0.36 * len(names),
        ),
    )
    said = (
        f"mean {word} loss and its 95 % interval over the runs, by Student's t: it says how much "
        "runs differ, not how sure one of them is"
    )
    marks = ["best" if name == best else None for name in names]
    return [Words([said]), Drawing(picture), Table("Means", rows, marks=marks)]


def _series(
    titles: Sequence[str],
    names: Sequence[str],
    by_run: Sequence[Mapping[str, float]],
    summary: Mapping[str, tuple[float, float | None]],
) -> list[Series]:
    runs: list[Series] = []
    for title, found in zip(titles, by_run, strict=True):
        legend, values = "" if runs else "a run", [found[name] for name in names]
        runs.append(Series(title, values, "o", hollow=True, size=4, legend=legend))
    means = [summary[name][0] for name in names]
    errors = [summary[name][1] for name in names]
    return [*runs, Series("mean, 95 %", means, "D", errors=errors)]


def _tiles(reports: Sequence[Any]) -> list[Tile]:
    found = []
    gains = [report.gained.by for report in reports if getattr(report, "gained", None)]
    if len(gains) == len(reports):
        mean, half = mean_interval(gains)
        low, high = mean - (half or 0.0), mean + (half or 0.0)
        found.append(Tile("mean gain", mean, f"95 %: {number(low)} .. {number(high)}"))
        better = sum(gain > 0 for gain in gains)
        found.append(Tile("below the best simple average", f"{better} of {len(gains)}", "runs"))
    return found


def _runs(reports: Sequence[Any], titles: Sequence[str]) -> Rows:
    rows: Rows = []
    for report, title in zip(reports, titles, strict=True):
        row: dict[str, Cell] = {"run": title, "kind": report.kind}
        for name in ("seed", "K", "k"):
            if hasattr(report, name):
                row[name] = getattr(report, name)
        if solver := report.config.get("solver"):
            row["solver"] = str(solver)
        if report.kind == "select":
            row |= {
                "selection": report.average.selection_loss,
                "expected": report.expected.loss if report.expected else None,
                "held-out": report.average.heldout_loss,
                "best simple": next(iter(report.references.values())).heldout_loss,
                "gained": report.gained.by if report.gained else None,
            }
        elif report.kind == "compare" and report.best is not None:
            best = report.rows[report.best]
            row |= {"best": with_K(best.method, best.K), "held-out": best.heldout_loss}
        elif report.kind == "inspect":
            row |= {"verdict": report.verdict, "checkpoints": len(report.checkpoints)}
        if spent := getattr(report, "cost", None):
            row["seconds"] = spent.seconds.total
        rows.append(row)
    return rows


def _titles(names: Sequence[str | None]) -> list[str]:
    """Short, and no two alike."""
    short = [
        PurePath(n).name.removesuffix(".json").removesuffix(".report") if n else "" for n in names
    ]
    if len(set(short)) < len(short):
        short = [name or "" for name in names]
    found: list[str] = []
    for i, name in enumerate(short, 1):
        found.append(name if name and name not in found else f"{name or 'run'} ({i})")
    return found


def _settings(report: Head) -> str:
    """Of runs of one kind it is the same."""
    kept = {key: value for key, value in report.config.items() if key not in _RUN}
    return json.dumps([report.kind, kept], sort_keys=True, default=str)


def _apart(reports: Sequence[Head]) -> list[str]:
    """In what a group's settings differ from another's."""
    configs = [report.config for report in reports]
    keys = {key for config in configs for key in config} - _RUN
    differ = sorted(
        key for key in keys if len({json.dumps(c.get(key), sort_keys=True) for c in configs}) > 1
    )
    said = []
    for config in configs:
        known = [f"{key} {json.dumps(config.get(key), ensure_ascii=False)}" for key in differ[:4]]
        said.append(", ".join(known))
    return said
