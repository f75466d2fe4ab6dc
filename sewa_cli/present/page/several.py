"""Several reports side by side: seeds, solvers, settings; means and intervals over runs alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from pathlib import PurePath
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.direction import loss_of
from sewa_cli.present.page.parts import Chapter, Drawing, Part, Section, Table, Tile, Words
from sewa_cli.present.plots import Picture, panels
from sewa_cli.present.plots.dots import Series, draw_dots
from sewa_cli.text import number, with_K

if TYPE_CHECKING:
    from sewa_cli.present.sheet import Cell, Rows
    from sewa_cli.report.metric import Contest
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Head, Scores

# what may differ between runs of one kind: which run it was, and where its results went
_RUN: Final = {"seed", "checkpoints", "output", "report", "cache", "memory", "device"}
_MEANS: Final = ("average", "mean", "low", "high")  # columns, before one for each run
_MOST_DRAWN: Final = 60  # averages in a picture
# 97.5 % of Student's t with 1, 2, … degrees of freedom
_T: Final = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over runs, and half of its 95 % interval by Student's t; None: one run has none."""
    if len(values) < 2:
        return mean(values), None
    half = _students(len(values) - 1) * (stdev(values) / sqrt(len(values)))
    return mean(values), half if isfinite(half) else None


def _students(freedom: int) -> float:
    """By the table, then from the normal's by Cornish and Fisher: exact to four digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, v = 1.959964, float(freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return z + (z**3 + z) / (4 * v) + second + third


def side_by_side(reports: Sequence[Head], names: Sequence[str | None]) -> Chapter:
    """One table of all runs; for each group of runs of one kind, means with intervals."""
    named = titles(names)
    settings = [_settings(report) for report in reports]
    groups: dict[str, list[int]] = {}
    for i, found_here in enumerate(settings):
        groups.setdefault(json.dumps(found_here, sort_keys=True, default=str), []).append(i)
    apart = _apart([settings[members[0]] for members in groups.values()])
    sections = [Section("Run by run", [Table("Runs", _runs(reports, named))])]
    for label, members in zip(apart, groups.values(), strict=True):
        if len(members) > 1:
            found = [reports[i] for i in members]
            parts = _means(found, [named[i] for i in members])
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
    headline = f"{len(reports)} runs side by side"
    gains = _gains(reports)
    if len(groups) == 1 and gains:
        better = f"{sum(gain > 0 for gain in gains)} of {len(gains)} runs"
        headline = f"A lower held-out loss than the best simple average in {better}"
    return Chapter(
        headline=headline,
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
    if found := getattr(report, "contest", None):
        return _by_metric(found)
    if report.kind == "select":
        # the best simple average is another one in another run: its place is what they share
        best, *others = report.references.items()
        rows = {"what was chosen": _chosen(report), "best simple average": best[1], **dict(others)}
        if best[0] in ("last", "uniform"):
            rows[best[0]] = best[1]
    elif report.kind == "compare":
        rows = {with_K(row.method, row.K): row for row in report.rows}
        if report.judged is not None:
            by_metric = {name: row.held[0] for name, row in rows.items()}
            return {name: score for name, score in by_metric.items() if score is not None}
    elif report.kind == "evaluate":
        short = [PurePath(file.path).name for file in report.files]
        times = Counter(short)
        rows = {
            name if times[name] == 1 else file.path: file
            for name, file in zip(short, report.files, strict=True)
        }
    else:
        return {}
    found = {name: getattr(row, measure) for name, row in rows.items()}
    return {name: loss for name, loss in found.items() if loss is not None and isfinite(loss)}


def _by_metric(found: Contest) -> dict[str, float]:
    """Scores of what was written and of those that it had to beat."""
    measure = "selection" if found.heldout_parts is None else "heldout"
    by_name = {name: getattr(one, measure) for name, one in found.scores.items()}
    rows: dict[str, float | None] = {
        "what was written": next(iter(by_name.values())),
        "incumbent": by_name.get(found.incumbent),
        "leader": by_name.get(found.leader),
        **{name: by_name[name] for name in ("last", "uniform") if name in by_name},
    }
    return {name: score for name, score in rows.items() if score is not None}


def _chosen(report: Report) -> Scores:
    """What was learned, even where a simple average was written in its place."""
    return report.learned if report.instead_of and report.learned else report.average


def _means(reports: Sequence[Head], titles: Sequence[str]) -> list[Part]:
    by_run = [scores(report) for report in reports]
    names = [name for name in by_run[0] if all(name in found for found in by_run)]
    if not names:
        return [Words([f"there is no {_measured(reports[0])[0]} that all of them have"])]
    rows: Rows = []
    summary: dict[str, tuple[float, float | None]] = {}
    for name in names:
        middle, half = summary[name] = mean_interval([found[name] for found in by_run])
        row: dict[str, Cell] = {"average": name, "mean": middle}
        row |= {
            "low": None if half is None else middle - half,
            "high": None if half is None else middle + half,
        }
        rows.append({**row, **{t: found[name] for t, found in zip(titles, by_run, strict=True)}})
    what, sign = _measured(reports[0])
    order = sorted(names, key=lambda name: sign * summary[name][0])
    best, drawn = order[0], order[:_MOST_DRAWN]
    drawn = [name for name in names if name in drawn]
    fewer = f"; the {len(drawn)} best of {len(names)} are drawn"
    picture = Picture(
        f"Mean {what} over {len(reports)} runs",
        f"A row for each average: small dots are runs, large ones means with 95 % intervals. "
        f"{best} has the best mean, {number(summary[best][0])}.",
        lambda: panels(
            lambda axes: draw_dots(axes, drawn, _series(titles, drawn, by_run, summary)),
            height=1.0 + 0.36 * len(drawn),
        ),
    )
    said = (
        f"mean {what} and its 95 % interval over the runs, by Student's t: it says how much "
        f"runs differ, not how sure one of them is{fewer if len(drawn) < len(names) else ''}"
    )
    sources = {tuple(one.path for one in getattr(report, "candidates", ())) for report in reports}
    if len(sources) == 1 and sources != {()}:
        said += "; all of them average the same checkpoints, so of other trainings it says nothing"
    marks = ["best" if name == best else None for name in names]
    return [Words([said]), Drawing(picture), Table("Means", rows, marks=marks)]


def _measured(report: Any) -> tuple[str, int]:
    """What is compared, and -1 where more of it is better."""
    contest, judged = getattr(report, "contest", None), getattr(report, "judged", None)
    by = contest or judged
    if contest is not None:
        held = contest.heldout_parts is not None
    else:  # `compare` has scores of held-out parts only
        held = judged is not None or getattr(report, "heldout_rows", None) is not None
    word = f"{'held-out' if held else 'selection'} {by.metric if by else 'loss'}"
    return word, int(loss_of(1, by.goal)) if by else 1


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


def _gains(reports: Sequence[Any]) -> list[float]:
    """Over the best simple average; none unless every run has one."""
    gains = [report.gained.by for report in reports if getattr(report, "gained", None)]
    return gains if len(gains) == len(reports) else []


def _tiles(reports: Sequence[Any]) -> list[Tile]:
    found = []
    if gains := _gains(reports):
        middle, half = mean_interval(gains)
        low, high = middle - (half or 0.0), middle + (half or 0.0)
        found.append(Tile("mean gain", middle, f"95 %: {number(low)} .. {number(high)}"))
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
        if found := getattr(report, "contest", None):
            written, of_it = next(iter(found.scores.items()))
            row |= {
                "metric": found.metric,
                "written": written,
                "to choose by": of_it.selection,
                "held-out": of_it.heldout,
                "gained": found.gained.by if found.gained else None,
            }
        elif report.kind == "select":
            chosen = _chosen(report)
            row |= {
                "selection": chosen.selection_loss,
                "expected": report.expected.loss if report.expected else None,
                "held-out": chosen.heldout_loss,
                "best simple": next(iter(report.references.values())).heldout_loss,
                "gained": report.gained.by if report.gained else None,
            }
        elif report.kind == "compare" and report.best is not None:
            best = report.rows[report.best]
            row |= {"best": with_K(best.method, best.K), "held-out": best.held[0]}
        elif report.kind == "inspect":
            row |= {"verdict": report.verdict, "checkpoints": len(report.checkpoints)}
        if standing := getattr(report, "standing", None):
            row["the run is"] = standing.verdict
        if spent := getattr(report, "cost", None):
            row["seconds"] = spent.seconds.total
        rows.append(row)
    return rows


def titles(names: Sequence[str | None]) -> list[str]:
    """Short, no two alike, and none like a column of ours."""
    short = [
        PurePath(n).name.removesuffix(".json").removesuffix(".report") if n else "" for n in names
    ]
    if len(set(short)) < len(short):
        short = [name or "" for name in names]
    found: list[str] = []
    for i, name in enumerate(short, 1):
        title = name or f"run ({i})"
        while title in (*found, *_MEANS):
            title += f" ({i})"
        found.append(title)
    return found


def _settings(report: Any) -> dict[str, Any]:
    """Of runs of one kind they are the same: settings, and what losses were measured on."""
    kept = {key: value for key, value in report.config.items() if key not in _RUN}
    args = kept.get("args") or {}
    kept["args"] = {key: value for key, value in args.items() if "seed" not in key.lower()}
    kept["kind"] = report.kind
    for fact in ("task", "code", "parameters", "selection_rows", "heldout_rows"):
        kept[fact] = getattr(report, fact, None)
    rows = {"select": "references", "compare": "rows", "evaluate": "files"}.get(report.kind)
    found = getattr(report, rows) if rows else []
    first = next(iter(found.values() if isinstance(found, dict) else found), None)
    kept["metrics"] = sorted(getattr(first, "metrics", None) or {})
    return kept


def _apart(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """In what a group's settings differ from another's."""
    every = [_flat({**one, "code": str(one.get("code"))[:12]}) for one in settings]
    keys = {key for found in every for key in found} - {"kind"}
    differ = sorted(key for key in keys if len({str(one.get(key)) for one in every}) > 1)
    if "solver" in differ:  # each has its own settings, of course
        differ = [key for key in differ if not key.startswith("solvers.")]
    return [", ".join(f"{key} {one.get(key, '–')}" for key in differ[:4]) for one in every]


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings within settings as a.b."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inside = isinstance(value, Mapping)
        found |= _flat(value, f"{before}{key}.") if inside else {f"{before}{key}": value}
    return found
