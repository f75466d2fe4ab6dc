"""Tables of the studies beside the main one: settings of the solvers, and over-fitting."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from plan import Setting
from tables import Found, Runs, estimate

Table = list[dict[str, str]]


def tuning_table(found: Sequence[Found], settings: Sequence[Setting]) -> Table:
    """Held-out loss with one setting changed, as a share of what it is with the defaults."""
    rows = [row for row in found if row.study == "tuning"]
    jobs = list(dict.fromkeys(row.job for row in rows))
    table = []
    for solver in ("gumbel", "linear"):
        for job in (j for j in jobs if j.split()[0] == solver):
            line = {"solver": solver, "changed": job.partition(" ")[2] or "(defaults)"}
            shares = []
            for setting in settings:
                plain = _runs(rows, setting, solver, "sewa", None)
                changed = _runs(rows, setting, job, "sewa", None)
                if not plain or not changed:
                    line[setting.name] = ""
                    continue
                if job == solver:
                    line[setting.name] = f"{fmean(plain.values()):.4g}"
                    continue
                scale = {seed: plain[seed] for seed in plain.keys() & changed.keys()}
                ratio = {seed: 100 * (changed[seed] / scale[seed] - 1) for seed in scale}
                shares += list(ratio.values())
                line[setting.name] = estimate(list(ratio.values())).show(2, signed=True) + " %"
            line["all runs"] = estimate(shares).show(2, signed=True) + " %" if shares else ""
            table.append(line)
    return table


def overfitting_table(found: Sequence[Found], setting: Setting) -> Table:
    """What the selection data promised, and what was found held out, both against `uniform`."""
    rows = [row for row in found if row.study == "overfitting" and row.setting == setting.name]
    table = []
    for job in dict.fromkeys(row.job for row in rows):
        solver, source, size = job.split()
        for K in dict.fromkeys(row.K for row in rows if row.job == job and row.method == "sewa"):
            plain = f"gumbel {source} {size}"  # the job that has the mean of all beside it
            promised = _gain(rows, setting, job, plain, K, "selection_loss")
            kept = _gain(rows, setting, job, plain, K, "heldout_loss")
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
    rows: Sequence[Found], setting: Setting, job: str, plain: str, K: int | None, what: str
) -> list[float]:
    mine = _runs(rows, setting, job, "sewa", K, what)
    mean = _runs(rows, setting, plain, "uniform", None, what)
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
