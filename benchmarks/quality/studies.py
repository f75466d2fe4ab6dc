"""Tables of the studies next to the main one: overfitting, moving windows, draws of examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean, stdev

from plan import Setting, draws, methods, windows
from running import finished
from tables import Found, Runs, estimate

Table = list[dict[str, str]]


def draws_table(folder: Path, settings: Iterable[Setting], seeds: Sequence[int]) -> Table:
    """Return held-out losses above that of the mean of all, in %, over draws of selection rows."""
    rows = []
    for setting in settings:
        for seed in seeds:
            reports = [finished(folder, setting, seed, job) for job in draws(setting)]
            found = [report for report in reports if report is not None]
            if len(found) < 2:
                continue
            row = {"setting": setting.name, "draws": str(len(found))}
            for name, losses in (
                ("the default", [r["average"]["heldout_loss"] for r in found]),
                (
                    "best baseline by the same examples",  # which the references begin with
                    [next(iter(r["references"].values()))["heldout_loss"] for r in found],
                ),
            ):
                uniform = [r["references"]["uniform"]["heldout_loss"] for r in found]
                above = [100 * (a / b - 1) for a, b in zip(losses, uniform, strict=True)]
                spread = f"{fmean(above):+.2f} (deviation {stdev(above):.2f})"
                row[name] = f"{spread}, {min(above):+.2f} to {max(above):+.2f}"
            rows.append(row)
    return rows


def overfitting_table(found: Sequence[Found], setting: Setting) -> Table:
    """Return differences from `uniform` in selection and in held-out data."""
    rows = [row for row in found if row.study == "overfitting" and row.setting == setting.name]
    table = []
    for job in dict.fromkeys(row.job for row in rows):
        solver, source, size = job.split()
        for K in dict.fromkeys(row.K for row in rows if row.job == job and row.method == "sewa"):
            promised = _gain(rows, setting, job, K, "selection_loss")
            kept = _gain(rows, setting, job, K, "heldout_loss")
            if promised and kept:
                table.append(
                    {
                        "solver": solver,
                        "selected by": f"{size} {source} rows",
                        "K": str(K),
                        "selection loss − that of the mean": estimate(promised).show(3, True),
                        "held-out loss − that of the mean": estimate(kept).show(3, True),
                        "worse than the mean in": f"{sum(v > 0 for v in kept)} of {len(kept)}",
                    }
                )
    return table


def _gain(
    rows: Sequence[Found], setting: Setting, job: str, K: int | None, what: str
) -> list[float]:
    mine = _runs(rows, setting, job, "sewa", K, what)
    mean = _runs(rows, setting, job, "uniform", None, what)
    return [mine[seed] - mean[seed] for seed in sorted(mine.keys() & mean.keys())]


def _runs(
    rows: Sequence[Found],
    setting: Setting,
    job: str,
    method: str,
    K: int | None,
    what: str = "heldout_loss",
) -> Runs:
    """K None: whatever K there is."""
    return {
        row.seed: getattr(row, what)
        for row in rows
        if row.setting == setting.name
        and row.job == job
        and row.method == method
        and (K is None or row.K == K)
    }


def auto_table(folder: Path, settings: Sequence[Setting], seeds: Sequence[int]) -> Table:
    """Return what `--K auto` has taken in each training run."""
    table = []
    for setting in settings:
        taken = []
        for seed in seeds:
            [job] = [job for job in methods(setting) if job.name == "auto"]
            report = finished(folder, setting, seed, job)
            if report is not None:
                taken.append(f"{report['written']} {report['K']}")
        if taken:
            table.append({"setting": setting.name, "taken, and of how many": ", ".join(taken)})
    return table


@dataclass(frozen=True)
class Curves:
    """One setting's windows: `points[method][what]` is a row of numbers for each training run."""

    setting: Setting
    at: list[int]
    points: dict[str, dict[str, list[list[float]]]]
    reaches: dict[str, list[int | None]]  # training by when the last checkpoint's level is kept

    def mean(self, method: str, what: str) -> list[float]:
        return [fmean(column) for column in zip(*self.points[method][what], strict=True)]


def load_curves(folder: Path, setting: Setting, seeds: Sequence[int]) -> Curves | None:
    jobs = list(windows(setting))
    curves = Curves(setting, [job.to_step or 0 for job in jobs], {}, {})
    for seed in seeds:
        reports = [finished(folder, setting, seed, job) for job in jobs]
        along = [report["rows"] for report in reports if report is not None]
        if not along or len(along) < len(jobs):
            continue
        level = next(row["heldout_loss"] for row in along[-1] if row["method"] == "last")
        for rows in zip(*along, strict=True):
            method = rows[0]["method"]
            losses = [_or_nan(row["heldout_loss"]) for row in rows]
            here = curves.points.setdefault(method, {"heldout_loss": [], "metric": []})
            here["heldout_loss"].append(losses)
            here["metric"].append([_or_nan(row["metrics"][setting.metric]) for row in rows])
            curves.reaches.setdefault(method, []).append(_reached(curves.at, losses, level))
    return curves if curves.points else None


def _reached(at: Sequence[int], losses: Sequence[float], level: float) -> int | None:
    """Return the first step from which on no loss is above the level."""
    found = None
    for step, loss in reversed([*zip(at, losses, strict=True)]):
        if not loss <= level:
            break
        found = step
    return found


def _or_nan(value: float | None) -> float:
    return nan if value is None else value


def windows_table(curves: Curves) -> Table:
    """Return each method's metric by window, and when it reaches the last checkpoint's loss."""
    table = []
    for method in curves.points:
        line = {"method": method}
        for at, value in zip(curves.at, curves.mean(method, "metric"), strict=True):
            line[f"step {at}"] = f"{value:.4g}"
        reached = curves.reaches.get(method, [])
        line["reaches the last one's loss at step"] = ", ".join(
            "never" if at is None else str(at) for at in reached
        )
        table.append(line)
    return table
