"""What a choice by a metric says: who was taken, who led, and whether that was luck."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING

from sewa_cli.direction import comparative
from sewa_cli.present.sheet import Cell, Ordered, Rows, Sheet, beside
from sewa_cli.text import few, number, with_K

if TYPE_CHECKING:
    from sewa_cli.report.metric import Contest, Entry, MetricGain
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Interval

ASKED = 100  # e-value; solvers ask for the same
OTHERS = 12  # entries in the terminal's table, beside those that are scored held out
FEW_STEPS = 3  # of an entry, in a table


def sheet(report: Report) -> Sheet:
    """The one that was written and its references held out; then how all others did."""
    found = report.contest
    assert found is not None
    rows: Rows = []
    seen: Rows = []
    has_failed = any(scores.failed for scores in found.scores.values())
    for name, scores in found.scores.items():
        ends = scores.interval
        line: dict[str, Cell] = {
            "average": name,
            f"selection_{found.metric}": scores.selection,
            "parts": scores.selection_parts,
            f"heldout_{found.metric}": scores.heldout,
            "low": ends.low if ends else None,
            "high": ends.high if ends else None,
            "failed": scores.failed,
        }
        rows.append({**line, **beside(scores.others, line)})
        row: dict[str, Cell] = {
            "average": f"{name}{_title(name, found)}",
            f"{found.metric} to choose by": scores.selection,
            "of parts": scores.selection_parts,
        }
        if found.heldout_parts is not None:
            row[f"held-out {found.metric} ({found.heldout_used})"] = scores.heldout
            row["95 %"] = _range(ends)
        if has_failed:
            row["failed"] = scores.failed
        seen.append({**row, **beside(scores.others, row)})
    return Sheet(rows, [("", seen), ("", entries(found)[:OTHERS])])


def entries(found: Contest) -> Rows:
    """How those that competed did on the parts to choose by, best first."""
    has_dueled = any(entry.evidence is not None for entry in found.entries)
    return [
        {
            "competed": with_K(entry.name, entry.K),
            "steps": _steps(entry),
            "parts": entry.parts,
            found.metric: entry.score,
            "±": None if entry.error is None else 1.96 * entry.error,
            "ahead": entry.ahead,
            **({"e-value of the duel": _evidence(entry.evidence)} if has_dueled else {}),
            "": entry.state or "",
        }
        for entry in found.entries
    ]


def _steps(entry: Entry) -> str:
    """Return its checkpoints' steps, or how many there are of them."""
    steps = [step for step in entry.selected_steps or () if step is not None]
    if len(steps) != entry.size:
        return f"{entry.size} checkpoints"
    if len(steps) <= FEW_STEPS:
        return ", ".join(map(str, steps))
    return f"{entry.size} of {steps[0]}–{steps[-1]}"


def _evidence(value: float | None) -> Cell:
    return None if value is None else Ordered(f"{value:.2g}", value)


def _title(name: str, found: Contest) -> str:
    marks = [name == next(iter(found.scores)), name == found.leader, name == found.incumbent]
    words = [
        word for word, is_so in zip(("written", "led", "incumbent"), marks, strict=True) if is_so
    ]
    return f" ({', '.join(words)})" if words else ""


def _range(interval: Interval | None) -> str:
    return "" if interval is None else f"{number(interval.low, 4)} .. {number(interval.high, 4)}"


def verdict(found: Contest) -> str:
    """Who was taken, and why."""
    written = next(iter(found.scores))
    if found.overruled is not None:
        return (
            f"`{written}` was taken: it is significantly better than `{found.overruled}`, "
            "which the contest chose"
        )
    if found.leader == found.incumbent:
        return _no_leader(found, written)
    if not any(entry.ahead is not None for entry in found.entries if _leads(entry, found)):
        return _nothing_told(written)
    if found.crowned is None:
        return (
            f"`{written}` has the best {found.metric} and was taken at its word: {found.parts} "
            f"part{'s' if found.parts > 1 else ''} cannot tell a lead from luck"
        )
    if found.crowned:
        parts = "parts" if found.dueled is None else f"{found.dueled:,} parts"
        return (
            f"`{written}` was taken: shown to be better than `{found.incumbent}` by {parts} that "
            f"had no say in its lead (e-value {found.evidence:.3g}, {ASKED} is asked for)"
        )
    if found.leader == written:
        return (
            f"`{written}` was taken, the best baseline: better than `{found.incumbent}` on the "
            f"parts that both met, but not significantly (e-value {found.evidence:.3g}, {ASKED} is "
            "asked for)"
        )
    if found.evidence == 1:  # it has met nobody there, or does the very same
        return (
            f"nobody is crowned: `{found.leader}` led when the search ended, of "
            f"{_met(found) + 1:,} averages that had met, and no part that had no say in that tells "
            f"it from `{found.incumbent}`; `{written}` was taken"
        )
    if found.ahead is not None and found.ahead <= 0:
        return (
            f"nobody is crowned: `{found.leader}` led the search, and did no better than "
            f"`{written}` on parts that had no say in it; `{written}` was taken"
        )
    why = f"that may be luck (e-value {found.evidence:.3g}, {ASKED} is asked for)"
    if found.evidence >= ASKED:
        why = "it may only win often, and lose by more where it does"
    return f"nobody is crowned: `{found.leader}` leads, but {why}; `{written}` was taken"


def _leads(entry: Entry, found: Contest) -> bool:
    return entry.state in ("taken", "leading") and with_K(entry.name, entry.K) == found.leader


def _nothing_told(written: str) -> str:
    return (
        "nothing could be told: the budget was too small for two averages to meet; "
        f"`{written}` was taken"
    )


def _met(found: Contest) -> int:
    """Others that the incumbent has met; an older report does not say."""
    if found.met is not None:
        return found.met
    return sum(entry.ahead is not None for entry in found.entries)


def _no_leader(found: Contest, written: str) -> str:
    """What was there without the metric is in front: of how many?"""
    met = _met(found)
    if met == 0 and (found.asked or 0) <= 1:
        return _nothing_told(written)
    who = f"`{written}` was taken"
    if met == 0:
        return f"{who}: a search among {found.asked:,} averages has led to no other"
    if met == 1:
        return f"{who}: one other met it on the same parts, and did not come to lead"
    return f"{who}: {met:,} others met it on the same parts, and none came to lead"


def heldout(found: Contest) -> str:
    """What it is worth on parts that nothing was chosen by."""
    written, scores = next(iter(found.scores.items()))
    if scores.heldout is None and found.heldout_parts is None:
        return f"no held-out {found.metric}: the task lists no parts to report by"
    if scores.heldout is None and found.interrupted and not found.heldout_evaluations:
        return f"no held-out {found.metric}: interrupted"
    if scores.heldout is None:
        return (
            f"no held-out {found.metric} of `{written}`: it has failed on all "
            f"{found.heldout_parts:,} held-out parts"
        )
    said = f"held-out {found.metric} of `{written}` {number(scores.heldout)}"
    if scores.interval:
        said += f" (95 %: {_range(scores.interval)})"
    return said + "".join(map(_against, filter(None, (found.over_last, found.gained))))


def _against(gained: MetricGain) -> str:
    low, high = (gained.interval.low, gained.interval.high) if gained.interval else (None, None)
    by, way = abs(gained.by), "better" if gained.by >= 0 else "worse"
    if low == high == 0 or (by == 0 and low is None):
        return f", equal to that of `{gained.over}`"
    if low is None or high is None:
        return f", {number(by)} {way} than `{gained.over}`; too few parts to rule out luck"
    sure = f"{number(gained.by)} (95 %: {number(low, 4)} .. {number(high, 4)})"
    if high < 0:
        sure = f"{number(by)} (95 %: {number(0.0 - high, 4)} .. {number(0.0 - low, 4)})"
    if low <= 0 <= high:
        more = f"; about {gained.more:,} more held-out parts would tell" if gained.more else ""
        return f"; against `{gained.over}` undecided: {sure}{more}"
    return f", {way} than `{gained.over}` by {sure}"


def failed(found: Contest) -> list[str]:
    """Held-out parts that some, or all, have no score for; `heldout` says so of what is written."""
    written = next(iter(found.scores))
    counts = {
        name: None if scores.failed and scores.heldout is None else scores.failed
        for name, scores in found.scores.items()
        if scores.heldout is not None or name != written
    }
    return failures(
        counts, found.heldout_used, found.heldout_left_out, found.failure_counts_as, found.metric
    )


def failures(
    counts: Mapping[str, int | None],
    parts: int,
    left_out: int,
    counts_as: float | None,
    metric: str,
) -> list[str]:
    """Of averages, by name, on so many held-out parts; None: it failed on all of them."""
    said = []
    if left_out:
        are = "part has" if left_out == 1 else "parts have"
        rest = f"the scores are of the other {parts:,}" if parts else "there is no other"
        said.append(f"{left_out:,} held-out {are} failed for all: left out, {rest}")
    if none := [f"`{name}`" for name, count in counts.items() if count is None]:
        said.append(f"no held-out {metric} of {few(none, 6)}: all {parts:,} parts have failed")
    if some := [f"`{name}` on {count:,}" for name, count in counts.items() if count]:
        said.append(
            f"of {parts:,} held-out parts, {few(some, 6)} failed where others did not; each counts "
            f"as a {metric} of {number(counts_as)}, worse than any there is"
        )
    return said


def effort(found: Contest) -> str:
    """What was asked."""
    spent = f"{found.evaluations:,} evaluation{'' if found.evaluations == 1 else 's'}"
    of = f" of {found.budget:,}" if isinstance(found.budget, int) else f" in {found.budget}"
    said = (
        f"{spent}{of} to choose by {found.metric} ({comparative(found.goal)} is better), over "
        f"{found.parts:,} part{'' if found.parts == 1 else 's'}"
    )
    if found.heldout_evaluations:
        said += f"; {found.heldout_evaluations:,} held out"
    if found.failures:
        said += f"; {len(found.failures)} failed"
    if found.unspent:
        said += f"; the rest is unspent: {found.unspent}"
    return f"{said}; interrupted" if found.interrupted else said


def headline(found: Contest) -> str:
    """Say what was gained over the last checkpoint."""
    name, own, last = _measured(found)
    return f"{name[0].upper()}{name[1:]} {number(own, 3)}{than_last(own, last)}"


def _measured(found: Contest) -> tuple[str, float | None, float | None]:
    """Name a score, and return that of what was written and that of the last checkpoint."""
    own, last = next(iter(found.scores.values())), found.scores.get("last")
    if found.heldout_parts is None:
        before = last.selection if last else None
        return f"{found.metric} to choose by", own.selection, before
    return f"held-out {found.metric}", own.heldout, last.heldout if last else None


def than_last(value: float | None, last: float | None) -> str:
    """Say in words how far a score is from the last checkpoint's."""
    if value is None or last is None or not isfinite(value) or not isfinite(last):
        return ""
    if value == last:
        return ", as the last checkpoint's"
    if last <= 0:
        return f"; the last checkpoint's is {number(last, 3)}"
    return f", {percent(value, last)} {'below' if value < last else 'above'} the last checkpoint's"


def and_last(value: float | None, last: float | None) -> str:
    """Show a score of the last checkpoint next to another, and the change."""
    if last is None:
        return ""
    change = ""
    if value is not None and isfinite(value) and 0 < last < inf and value != last:
        change = f", {'−' if value < last else '+'}{percent(value, last)}"
    return f" (last checkpoint {number(last, 3)}{change})"


def percent(value: float, last: float) -> str:
    """Return how far a value is from another one, without a sign."""
    change = 100 * abs(value - last) / last
    return f"{change:.0f} %" if change >= 10 else f"{change:.2g} %"


def sentences(report: Report) -> list[str]:
    """Say what the terminal shows."""
    from sewa_cli.present.sentences import wrote

    found = report.contest
    assert found is not None
    name, own, last = _measured(found)
    said = [] if found.heldout_parts is None else [heldout(found)]
    if own is not None:
        said.insert(0, f"{name} {number(own, 3)}{and_last(own, last)}")
    return [*said, *failed(found), verdict(found), *wrote(report.output)]


def details(report: Report) -> list[str]:
    """Say which checkpoints were taken, and what it cost."""
    from sewa_cli.present.sentences import taken

    found, took = report.contest, report.cost.seconds
    assert found is not None
    return [
        taken(report),
        effort(found),
        f"{took.total:.1f} s on {report.device} (reading {took.read:.1f}, choosing "
        f"{took.learn:.1f}, scoring {took.evaluate:.1f}, writing {took.write:.1f})",
    ]
