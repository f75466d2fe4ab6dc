"""The paper's claims, each put to the training runs: it holds, ties or fails here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from plan import Setting
from tables import Estimate, Results, Runs, difference, verdict

AVERAGES = ("swa", "ema", "lawa", "random", "sewa")
BASELINES = ("swa", "ema", "lawa", "random")


@dataclass(frozen=True)
class Finding:
    claim: str
    setting: str
    against: str
    what: str
    difference: Estimate
    verdict: str

    def row(self) -> dict[str, str]:
        return {
            "claim": self.claim,
            "setting": self.setting,
            "against": self.against,
            "difference": self.difference.show(3, signed=True),
            "here": self.verdict,
        }


def findings(results: Results, what: str) -> list[Finding]:
    found: list[Finding] = []
    for setting in results.settings:
        found += _averages_beat_last(results, setting, what)
        found += _more_helps(results, setting, what)
        found += _ten_of_ours(results, setting, what)
    return found


def _averages_beat_last(results: Results, setting: Setting, what: str) -> Iterator[Finding]:
    K = setting.budgets[0]
    last = results.runs(setting, "last", None, what)
    for method in AVERAGES:
        runs = results.runs(setting, method, K, what)
        if runs and last:
            yield _finding(f"{method} beats the last checkpoint", setting, "last", what, runs, last)


def _more_helps(results: Results, setting: Setting, what: str) -> Iterator[Finding]:
    first, *_, final = setting.budgets
    for method in ("lawa", "random", "sewa"):
        few = results.runs(setting, method, first, what)
        many = results.runs(setting, method, final, what)
        if few and many:
            claim = f"{method}: K={final} is better than K={first}"
            yield _finding(claim, setting, f"{method} K={first}", what, many, few)


def _ten_of_ours(results: Results, setting: Setting, what: str) -> Iterator[Finding]:
    """At the same K, and against ten times as many checkpoints."""
    first, *_, final = setting.budgets
    for ours in ("sewa", "sewa linear"):
        mine = results.runs(setting, ours, first, what)
        for rival in BASELINES:
            for K in (first, final) if results.has_budget(setting, rival) else (first,):
                theirs = results.runs(setting, rival, K, what)
                if mine and theirs:
                    name = f"{rival} K={K}" if results.has_budget(setting, rival) else rival
                    claim = f"{ours} K={first} beats {name}"
                    yield _finding(claim, setting, name, what, mine, theirs)


def _finding(
    claim: str, setting: Setting, against: str, what: str, one: Runs, two: Runs
) -> Finding:
    found = difference(one, two)
    return Finding(
        claim,
        setting.name,
        against,
        what,
        found,
        verdict(found, -1 if what == "heldout_loss" else 1),
    )


def gains(results: Results, what: str, ours: str = "sewa") -> list[dict[str, str]]:
    """Return what ten learned checkpoints gain in each setting, in % of the last checkpoint."""
    rows = []
    for setting in results.settings:
        last = results.runs(setting, "last", None, what)
        uniform = results.runs(setting, "uniform", None, what)
        mine = results.runs(setting, ours, setting.budgets[0], what)
        if last and uniform and mine:
            scale = abs(fmean(last.values()))
            rows.append(
                {
                    "setting": setting.name,
                    "last": f"{fmean(last.values()):.4g}",
                    "minus last, %": _share(mine, last, scale),
                    "minus mean of all, %": _share(mine, uniform, scale),
                }
            )
    return rows


def _share(one: Runs, two: Runs, scale: float) -> str:
    found = difference(one, two)
    half = "" if found.half is None else f" ± {100 * found.half / scale:.2f}"
    return f"{100 * found.mean / scale:+.2f}{half}"


def summary(found: Sequence[Finding]) -> list[dict[str, str]]:
    """How often each claim held, over the settings."""
    claims = dict.fromkeys(f.claim for f in found)
    rows = []
    for claim in claims:
        of = [f for f in found if f.claim == claim]
        names = {v: [f.setting for f in of if f.verdict == v] for v in ("holds", "ties", "fails")}
        line = {"claim": claim, **{v: ", ".join(those) for v, those in names.items()}}
        undecided = [f.setting for f in of if f.verdict not in names]
        rows.append(line | {"too few runs": ", ".join(undecided)} if undecided else line)
    return rows


def counted(by_loss: Sequence[Finding], by_metric: Sequence[Finding]) -> list[dict[str, str]]:
    """Return in how many settings each claim fails, ties and holds."""
    shown = re.compile("sewa(?! linear)|.*last checkpoint")
    claims = dict.fromkeys(f.claim for f in by_loss if shown.match(f.claim))
    rows = []
    for claim in claims:
        row = {"claim": claim}
        for name, found in (("by loss", by_loss), ("by the metric", by_metric)):
            verdicts = [f.verdict for f in found if f.claim == claim]
            row[name] = "/".join(str(verdicts.count(v)) for v in ("fails", "ties", "holds"))
        rows.append(row)
    return rows
