"""How much worse than the best is each way to average, over runs and numbers of examples?"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from plan import Job, Setting, regret
from running import finished
from tables import Estimate, estimate, verdict

from sewa_cli import __version__

T = TypeVar("T")
Table = list[dict[str, str]]
Column = tuple[str, int | None]  # a method and its K
SIZES = ("200 examples", "1,000 examples", "all examples")
LEARNED = {"aggregate": "**the default**", "sewa": "SeWA, K=10", "greedy": "greedy"}
SPARSE = "`--sparse`, K found"
BY_ROWS = "best baseline by the same examples"  # of the family that every choice is held against
KEPT = Path(__file__).with_name("regret.json")
SHOWN = ("ema-window", "latest", "wsm", "uniform", "last")  # of the fixed ones, by setting


@dataclass(frozen=True)
class Unit:
    """A training run and a number of examples to choose by: held-out losses by name or column."""

    setting: str
    seed: int
    size: str
    learned: dict[str, float]
    fixed: dict[Column, float]
    made: str = ""  # which sewa, on what processor

    @property
    def key(self) -> tuple[str, int, str]:
        return self.setting, self.seed, self.size


def load_units(
    folder: Path, settings: Iterable[Setting], seeds: Iterable[int], kept: Path = KEPT
) -> list[Unit]:
    """Load the units that are complete, else those kept from another machine."""
    settings, seeds = list(settings), list(seeds)
    found = {unit.key: unit for unit in load_kept(kept)}
    found |= {unit.key: unit for s in settings for unit in _measured(folder, s, seeds)}
    order = [(s.name, seed, size) for s in settings for seed in seeds for size in SIZES]
    return [found[key] for key in order if key in found]


def _measured(folder: Path, setting: Setting, seeds: Iterable[int]) -> Iterator[Unit]:
    simple, *_ = regret(setting)  # looks at no rows to choose by
    for seed in seeds:
        table = finished(folder, setting, seed, simple)
        if table is None:
            continue
        fixed = {(r["method"], r["K"]): float(r["heldout_loss"]) for r in table["rows"]}
        for size, (learned, sparse) in jobs_of(setting, seed).items():
            rows = finished(folder, setting, seed, learned)
            few = finished(folder, setting, seed, sparse)
            if rows is None or few is None:
                continue
            losses = {LEARNED[r["method"]]: float(r["heldout_loss"]) for r in rows["rows"]}
            losses[SPARSE] = float(few["average"]["heldout_loss"])
            best_simple = next(iter(few["references"].values()))  # they begin with it
            losses[BY_ROWS] = float(best_simple["heldout_loss"])
            yield Unit(setting.name, seed, size, losses, fixed, _made())


def jobs_of(setting: Setting, seed: int) -> dict[str, tuple[Job, Job]]:
    """Return the jobs that learn, by the number of examples."""
    _, *rest = regret(setting, seed)
    return dict(zip(SIZES, zip(rest[::2], rest[1::2], strict=True), strict=True))


def left_to_do(setting: Setting, seed: int, kept: Path = KEPT) -> list[Job]:
    """The jobs of the units that nobody has kept yet."""
    have = {unit.key for unit in load_kept(kept)}
    found = [
        job
        for size, jobs in jobs_of(setting, seed).items()
        if (setting.name, seed, size) not in have
        for job in jobs
    ]
    return [next(regret(setting)), *found] if found else []


def load_kept(path: Path = KEPT) -> list[Unit]:
    """A whole study takes more hours than a machine may be had for: units are kept one by one.

    A unit is whole in itself: what learned and what is fixed are of the same training run.
    """
    rows = json.loads(path.read_text()) if path.exists() else []
    return [
        Unit(
            **{name: row[name] for name in ("setting", "seed", "size", "learned", "made")},
            fixed={(method, K): loss for method, K, loss in row["fixed"]},
        )
        for row in rows
    ]


def keep(units: Iterable[Unit], path: Path = KEPT) -> None:
    """Keep units, a line each; a new one replaces an old one."""
    found = {unit.key: _rounded(unit) for unit in load_kept(path)}
    for unit in map(_rounded, units):
        old = found.get(unit.key)  # the same once more was made when it was made
        if old is None or (old.learned, old.fixed) != (unit.learned, unit.fixed):
            found[unit.key] = unit
    lines = []
    for key in sorted(found):
        row = asdict(found[key])
        row["fixed"] = [[*column, loss] for column, loss in found[key].fixed.items()]
        lines.append(json.dumps(row, ensure_ascii=False))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _rounded(unit: Unit) -> Unit:
    return replace(unit, learned=_digits(unit.learned), fixed=_digits(unit.fixed))


def _digits(losses: dict[T, float]) -> dict[T, float]:
    return {name: float(f"{loss:.8g}") for name, loss in losses.items()}


def _made() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=KEPT.parent, capture_output=True, text=True
    )
    return f"{__version__} {commit.stdout.strip()}, {torch.backends.cpu.get_cpu_capability()}"


def columns(units: Sequence[Unit]) -> dict[str, dict[int, float]]:
    """Name → unit → loss: what learns, and each fixed method at the one K that is best for it.

    Of all K that every unit has, by the mean of its loss over that of the mean of all.
    """
    found: dict[str, dict[int, float]] = {
        name: {i: unit.learned[name] for i, unit in enumerate(units)}
        for name in units[0].learned
        if all(name in unit.learned for unit in units)
    }
    common = set.intersection(*(set(unit.fixed) for unit in units))
    by_method: dict[str, list[Column]] = defaultdict(list)
    for column in sorted(common, key=str):
        by_method[column[0]].append(column)
    for method, some in by_method.items():
        best = min(some, key=lambda c: fmean(u.fixed[c] / u.fixed["uniform", None] for u in units))
        name = method if best[1] is None else f"{method}, K={best[1]}"
        found[name] = {i: unit.fixed[best] for i, unit in enumerate(units)}
    return found


def regrets(units: Sequence[Unit]) -> dict[str, list[float]]:
    """Name → by unit, the loss above the best column's, in per cent of that."""
    found = columns(units)
    best = [min(column[i] for column in found.values()) for i in range(len(units))]
    return {
        name: [100 * (column[i] / best[i] - 1) for i in range(len(units))]
        for name, column in found.items()
    }


def tables(units: Sequence[Unit]) -> dict[str, Table]:
    """Return the tables by title, as a page has them at its marks."""
    return {
        "Regret, % of the held-out loss": regret_table(units),
        "How far the default is below the others, % of the held-out loss": lead_table(units),
        "Regret by setting, % of the held-out loss": setting_table(units),
        "The default against the best baseline of each setting": simple_table(units),
        "The default against the best baseline by the same examples": fair_table(units),
    }


def regret_table(units: Sequence[Unit]) -> Table:
    """A row for each column, the lowest mean first."""
    found = regrets(units)
    return [
        {"column": name, **_by_size(units, found[name]), "worst": f"{max(found[name]):.2f}"}
        for name in sorted(found, key=lambda name: fmean(found[name]))
    ]


def lead_table(units: Sequence[Unit]) -> Table:
    """Their regrets minus the default's, pair by pair."""
    found = regrets(units)
    default = found.pop(LEARNED["aggregate"])
    return [
        {"column": name}
        | _by_size(units, [r - own for r, own in zip(found[name], default, strict=True)])
        for name in sorted(found, key=lambda name: fmean(found[name]))
    ]


def _by_size(units: Sequence[Unit], values: Sequence[float]) -> dict[str, str]:
    """Means, and the mean of all, in which a training run counts once: its sizes are alike."""
    sizes, runs = defaultdict[str, list[float]](list), defaultdict[object, list[float]](list)
    for unit, value in zip(units, values, strict=True):
        sizes[unit.size].append(value)
        runs[unit.setting, unit.seed].append(value)
    row = {size: _show(estimate(sizes[size])) if sizes[size] else "" for size in SIZES}
    return row | {"all of them": _show(estimate([*map(fmean, runs.values())]))}


def setting_table(units: Sequence[Unit]) -> Table:
    """A row for each setting: mean regret over its seeds and sizes."""
    found = regrets(units)
    chosen = {*LEARNED.values(), SPARSE, BY_ROWS}
    shown = [n for n in found if n in chosen or n.split(",")[0] in SHOWN]
    shown.sort(key=lambda name: fmean(found[name]))
    rows = []
    for setting in dict.fromkeys(unit.setting for unit in units):
        row = {"setting": setting}
        for name in shown:
            here = [r for r, u in zip(found[name], units, strict=True) if u.setting == setting]
            row[name] = f"{fmean(here):.2f}"
        rows.append(row)
    return rows


def fair_table(units: Sequence[Unit]) -> Table:
    """The default minus the baseline that is best by the same examples."""
    known = [unit for unit in units if BY_ROWS in unit.learned]
    return [
        {"setting": setting} | _lead(of, [unit.learned[BY_ROWS] for unit in of])
        for setting, of in _by_setting(known).items()
    ]


def simple_table(units: Sequence[Unit]) -> Table:
    """The default minus the simple average that is best for the setting, by hindsight."""
    rows = []
    for setting, of in _by_setting(units).items():
        method, K = best = min(of[0].fixed, key=lambda c: fmean(unit.fixed[c] for unit in of))
        name = method if K is None else f"{method}, K={K}"
        row = {"setting": setting, "best baseline": name}
        rows.append(row | _lead(of, [unit.fixed[best] for unit in of]))
    return rows


def _by_setting(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    found = defaultdict[str, list[Unit]](list)
    for unit in units:
        found[unit.setting].append(unit)
    return found


def _lead(units: Sequence[Unit], others: Sequence[float]) -> dict[str, str]:
    """The default's loss minus another's, in per cent, by size; in the mean a run counts once."""
    by_size, by_seed = defaultdict[str, list[float]](list), defaultdict[int, list[float]](list)
    for unit, other in zip(units, others, strict=True):
        lead = 100 * (unit.learned[LEARNED["aggregate"]] / other - 1)
        by_size[unit.size].append(lead)
        by_seed[unit.seed].append(lead)
    row = {f"{size}, %": _judged(by_size[size]) for size in SIZES}
    return row | {"all of them, %": _judged([*map(fmean, by_seed.values())])}


def _judged(by_run: Sequence[float]) -> str:
    """A difference, and whether it is one."""
    if not by_run:
        return ""
    words = {"holds": "better", "ties": "tie", "fails": "worse"}
    found = estimate(by_run)
    return f"{_show(found)}: {words.get(verdict(found, -1), 'one run')}"


def _show(found: Estimate) -> str:
    half = "" if found.half is None else f" ± {found.half:.2f}"
    return f"{found.mean:.2f}{half}"
