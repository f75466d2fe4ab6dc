"""Tables of the jobs' results: means over training runs, 95 % intervals of Student's t."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose, isfinite, isnan, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from plan import STUDIES, Setting
from running import finished

# of 1, 2 … degrees of freedom; where there are more, the last is wide enough
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NAMES = {"linear": "sewa linear", "forward": "forward, predicted"}  # by job
EQUAL_WEIGHTS = {"lawa", "latest", "random", "topk", "sewa", "sewa linear"}
PAPER = ("last", "swa", "ema", "lawa", "random", "sewa", "sewa linear")
HEADS = {"last": "SGD (last)", "swa": "SWA", "ema": "EMA", "lawa": "LAWA", "random": "Random"}
HEADS |= {"sewa": "SeWA", "sewa linear": "SeWA linear"}


@dataclass(frozen=True)
class Estimate:
    """A mean over training runs, and half of its 95 % interval; none of a single run."""

    mean: float
    half: float | None
    runs: int

    def show(self, digits: int = 4, signed: bool = False) -> str:
        if not isfinite(self.mean):
            return "no number" if self.runs else ""
        sign = "+" if signed else ""
        shown = f"{self.mean:{sign}.{digits}g}"
        if self.half is None:
            return shown
        half = f"{self.half:.0f}" if self.half >= 10 else f"{self.half:.2g}"
        return f"{shown} ± {half}"


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2 or not all(map(isfinite, values)):
        return Estimate(sum(values) if values else nan, None, len(values))
    t = T95[min(len(values) - 1, len(T95)) - 1]
    return Estimate(fmean(values), t * stdev(values) / sqrt(len(values)), len(values))


@dataclass(frozen=True)
class Found:
    """One row of one job over one training run."""

    setting: str
    seed: int
    study: str
    job: str
    method: str
    K: int | None
    selection_loss: float
    heldout_loss: float
    metric: float
    seconds: float


def load(folder: Path, settings: Iterable[Setting], seeds: Iterable[int]) -> list[Found]:
    found = []
    for setting in settings:
        for seed in seeds:
            for job in (job for jobs, _ in STUDIES.values() for job in jobs(setting)):
                report = finished(folder, setting, seed, job)
                if report is not None:
                    found += _rows(report, setting, seed, job.study, job.name)
    return found


def _rows(
    report: Mapping[str, Any], setting: Setting, seed: int, study: str, job: str
) -> list[Found]:
    if study == "windows":
        return []
    if "average" in report:  # of `select`
        cost = {"seconds": report["cost"]["seconds"]["total"]}
        report = {"rows": [{**report["average"], "method": "sewa auto", "K": None, "cost": cost}]}
    return [
        Found(
            setting=setting.name,
            seed=seed,
            study=study,
            job=job,
            method=NAMES.get(job, row["method"]) if study == "methods" else row["method"],
            K=row["K"],
            selection_loss=_number(row["selection_loss"], worst=inf),
            heldout_loss=_number(row["heldout_loss"], worst=inf),
            metric=_number(row["metrics"][setting.metric], worst=-inf),
            seconds=row["cost"]["seconds"],
        )
        for row in report["rows"]
    ]


def _number(value: float | None, worst: float) -> float:
    return worst if value is None else value  # null: NaN or Inf, which nobody wants


Runs = dict[int, float]  # by seed


class Results:
    """The study of methods: `runs` of a setting, a method and a K, of the loss or the metric."""

    def __init__(self, found: Iterable[Found], settings: Sequence[Setting]) -> None:
        self.settings = list(settings)
        self._rows: dict[tuple[str, str, int | None], dict[int, Found]] = {}
        for row in found:
            if row.study == "methods":
                self._rows.setdefault((row.setting, row.method, row.K), {})[row.seed] = row

    def methods(self, setting: Setting) -> list[str]:
        return list(dict.fromkeys(method for name, method, _ in self._rows if name == setting.name))

    def runs(self, setting: Setting, method: str, K: int | None, what: str) -> Runs | None:
        """A method without K has one row for all; K = k equal weights are the mean of all."""
        for key in ((setting.name, method, K), (setting.name, method, None)):
            if key in self._rows:
                return {seed: getattr(row, what) for seed, row in self._rows[key].items()}
        measured = (setting.name, method, setting.learnable[0]) in self._rows
        if setting.k == K and measured and method in EQUAL_WEIGHTS:
            return self.runs(setting, "uniform", None, what)
        return None

    def has_budget(self, setting: Setting, method: str) -> bool:
        return any(key[:2] == (setting.name, method) and key[2] is not None for key in self._rows)

    def best_budget(self, setting: Setting, method: str, what: str) -> int | None:
        """Return the K with the best mean, chosen by the numbers that are shown."""
        if not self.has_budget(setting, method):
            return None
        sign = 1 if what == "heldout_loss" else -1
        means = {K: self.runs(setting, method, K, what) for K in setting.budgets}
        known = {K: fmean(runs.values()) for K, runs in means.items() if runs}
        return min(known, key=lambda K: sign * known[K], default=None)


def difference(one: Runs, two: Runs) -> Estimate:
    """Paired by training run."""
    seeds = sorted(one.keys() & two.keys())
    return estimate([_minus(one[seed], two[seed]) for seed in seeds])


def _minus(one: float, two: float) -> float:
    """The same average, made by two commands, differs in the last bits."""
    return 0.0 if isclose(one, two, rel_tol=1e-6) and isfinite(one) else one - two


def verdict(found: Estimate, better: int) -> str:
    """Return whether a claim holds, whose difference should have the sign `better`."""
    if isnan(found.mean):
        return "no number"
    if isfinite(found.mean):
        if found.half is None:
            return "one run"
        if abs(found.mean) <= found.half:
            return "ties"
    return "holds" if found.mean * better > 0 else "fails"


def paper_table(results: Results, what: str) -> list[dict[str, str]]:
    """Return the paper's layout: a row for each K and setting."""
    rows = []
    budgets = sorted({K for setting in results.settings for K in setting.budgets})
    for K in budgets:
        for setting in results.settings:
            cells = {m: results.runs(setting, m, K, what) for m in PAPER}
            known = {m: estimate(list(runs.values())) for m, runs in cells.items() if runs}
            if not known or K not in setting.budgets:
                continue
            shown = {HEADS[m]: known[m].show() if m in known else "" for m in PAPER}
            rows.append({"K": str(K), "setting": setting.name, **shown})
    return rows


def full_table(results: Results, setting: Setting, what: str) -> list[dict[str, str]]:
    """Every method at every K, the best mean first by its best K."""
    rows = []
    for method in results.methods(setting):
        row: dict[str, Any] = {"method": method}
        for K in setting.budgets if results.has_budget(setting, method) else [None]:
            runs = results.runs(setting, method, K, what)
            shown = estimate(list(runs.values())).show() if runs else ""
            row["any K" if K is None else f"K={K}"] = shown
        best = results.runs(setting, method, results.best_budget(setting, method, what), what)
        row["_"] = fmean(best.values()) if best else float("nan")
        rows.append(row)
    rows.sort(key=lambda row: float(row["_"]) * (1 if what == "heldout_loss" else -1))
    columns = ["method", "any K", *(f"K={K}" for K in setting.budgets)]
    return [{column: str(row.get(column, "")) for column in columns} for row in rows]


WORDS = {"holds": "better", "ties": "tie", "fails": "worse"}
RIVALS = ("last", "lawa", "random", "swa", "ema", "uniform", "greedy")


def learned_against(
    results: Results, setting: Setting, what: str, ours: str = "sewa"
) -> list[dict[str, str]]:
    """Our K=10 average minus each rival's, at the same K and at the rival's best K."""
    K = setting.budgets[0]
    mine = results.runs(setting, ours, K, what)
    better = -1 if what == "heldout_loss" else 1
    rows = []
    for rival in RIVALS:
        best = results.best_budget(setting, rival, what)
        for budget in dict.fromkeys([K, best] if best is not None else [None]):
            theirs = results.runs(setting, rival, budget, what)
            if mine is None or theirs is None:
                continue
            found = difference(mine, theirs)
            rows.append(
                {
                    "setting": setting.name,
                    "rival": rival,
                    "its K": "" if budget is None else str(budget),
                    f"{ours} minus rival": found.show(3, signed=True),
                    "better in": f"{_wins(mine, theirs, better)} of {found.runs}",
                    "verdict": WORDS.get(verdict(found, better), verdict(found, better)),
                }
            )
    return rows


def _wins(mine: Runs, theirs: Runs, better: int) -> int:
    return sum((mine[seed] - theirs[seed]) * better > 0 for seed in mine.keys() & theirs.keys())


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return "(nothing measured)"
    columns = list(rows[0])
    lines = [
        columns,
        ["---"] * len(columns),
        *([row[column] for column in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(
    page: str, tables: Mapping[str, Sequence[Mapping[str, str]]], study: str = "quality"
) -> str:
    """The page with each table after its mark, `<!-- quality: TITLE -->`, in place of the old.

    A table with no rows leaves what stands there: it was made where there were some.
    """

    def table(mark: re.Match[str]) -> str:
        if mark[2] not in tables:
            raise SystemExit(f"no such table: {mark[2]}; there are {', '.join(tables)}")
        rows = tables[mark[2]]
        return mark[1] + f"{markdown(rows)}\n\n" if rows else mark[0]

    page = re.sub(rf"(<!-- {study}: (.+?) -->\n\n)(?:\|.*\n)*\n*", table, page)
    return page.rstrip() + "\n"


def fill(
    pages: Iterable[Path],
    tables: Mapping[str, Sequence[Mapping[str, str]]],
    study: str = "quality",
) -> None:
    """Put the tables into these pages, at their marks."""
    for page in pages:
        page.write_text(filled(page.read_text(), tables, study))
