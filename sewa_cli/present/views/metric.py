"""The view of `select --metric`: the score held out, and whether its lead was confirmed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from sewa_cli.direction import comparative
from sewa_cli.present.charts import Chart, Dots, rows_panel
from sewa_cli.present.parts import (
    and_last,
    cost_section,
    curves,
    difference,
    ends,
    recalled,
    seconds,
    section,
    standing_section,
    taken,
    than_last,
    upper,
    weights_chart,
    weights_section,
    wrote,
)
from sewa_cli.present.view import Cell, Picture, Rows, Table, View, Words, metrics_of, titled
from sewa_cli.report.findings import ContestFinding
from sewa_cli.text import few, number, with_K

if TYPE_CHECKING:
    from sewa_cli.report.findings import ContestEntry
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Rival, Verdict

NEEDED: Final = 100  # e-value; solvers need the same
FEW_STEPS: Final = 3  # of an entry, in a table
OTHERS: Final = 12  # entries in the terminal's table


def view(report: Report) -> View:
    found = report.find(ContestFinding)
    assert found is not None
    name, own, last = _measured(found)
    held, judged = list(_heldout(found, report.verdict)), choice(found)
    rows, seen = _rows(found)
    entries, chart = _entries(found), _chart(found)
    marks = ["chosen", *[None] * (len(seen) - 1)]
    first = [] if own is None else [f"{name} {number(own, 3)}{and_last(own, last, is_loss=False)}"]
    weights = weights_chart(report)
    return View(
        headline=f"{upper(name)} {number(own, 3)}{than_last(own, last, is_loss=False)}",
        caveat=judged,
        says=[
            *(first + held + _failed(found)),
            judged,
            *wrote(report.output),
            *unspent(found),
            *recalled(report.cost),
        ],
        details=[taken(report), effort(found), *seconds(report)],
        rows=rows,
        tables=[Table("", seen), Table("", entries[:OTHERS])],
        sections=[
            *section(
                f"By {found.metric}",
                Words([*held, *_failed(found)]),
                Picture(chart),
                Table(f"{found.metric} on selection and held-out parts", seen, False, marks),
            ),
            *section(
                "Was the best one lucky?",
                Words([judged, effort(found), *unspent(found)]),
                Table("All that competed", entries, is_folded=True),
            ),
            *weights_section(report),
            *standing_section(report.standing),
            cost_section(report.cost, report.placement),
        ],
        plot=Chart("", "", [*chart.panels, *weights.panels]),
        numbers=dict(_numbers(report, found)),
        curves=curves(report),
        names={
            "metric": found.metric,
            "written": next(iter(found.scores)),
            "incumbent": found.incumbent,
            "leader": found.leader,
        },
    )


def _measured(found: ContestFinding) -> tuple[str, float | None, float | None]:
    """Name a score, and return that of what was written and that of the last checkpoint."""
    own, last = next(iter(found.scores.values())), found.scores.get("last")
    if found.heldout_parts is None:
        before = last.selection if last else None
        return f"selection {found.metric}", own.selection, before
    return f"held-out {found.metric}", own.heldout, last.heldout if last else None


def _heldout(found: ContestFinding, judged: Verdict) -> Iterator[str]:
    """Compare what was written with others on parts that nothing was chosen by."""
    written, scores = next(iter(found.scores.items()))
    if found.heldout_parts is None:
        return
    if scores.heldout is None and found.interrupted and not found.heldout_evaluations:
        yield f"no held-out {found.metric}: interrupted"
    elif scores.heldout is None:
        parts = f"all {found.heldout_parts:,} held-out parts"
        yield f"no held-out {found.metric} of `{written}`: it has failed on {parts}"
    else:
        if judged.baseline is not None:
            yield _versus(judged.baseline, judged)
        if judged.last is not None:
            yield _versus(judged.last.name, judged.last)


def _versus(name: str, found: Verdict | Rival) -> str:
    by, interval = found.difference or 0.0, found.interval
    if by == 0 and (interval is None or interval.low == interval.high == 0):
        return f"vs {name}: equal"
    said = f"vs {name}: {difference(by, interval)}"
    if interval is None:
        return f"{said}; too few parts for a confidence interval"
    if found.more:
        said += f"; about {found.more:,} more held-out parts would settle it"
    return said


def choice(found: ContestFinding) -> str:
    written, others = next(iter(found.scores)), (found.asked or 1) - 1
    evidence = f"e-value {found.evidence:.3g}, {NEEDED} is needed"
    leading = [one for one in found.entries if one.state in ("taken", "leading")]
    is_compared = any(
        one.ahead is not None for one in leading if with_K(one.name, one.K) == found.leader
    )
    if found.overruled is not None:
        return (
            f"kept `{written}`: it is significantly better than `{found.overruled}`, which the "
            "search chose"
        )
    if found.leader == found.incumbent and others:
        many = f"none of {others:,} other averages was"
        return f"kept `{written}`: {many if others > 1 else 'the other average was not'} better"
    if found.leader == found.incumbent or not is_compared:
        return (
            f"the budget was too small to compare two averages on the same parts; kept `{written}`"
        )
    if found.confirmed is None and found.parts == 1:
        many = f"of {others + 1:,} averages"
        return f"`{written}` has the best {found.metric} {many}; not confirmed: it is one number"
    if found.confirmed is None:
        count = f"{found.parts} part{'s are' if found.parts > 1 else ' is'}"
        return f"`{written}` has the best {found.metric}; {count} too few to confirm it"
    if found.confirmed:
        parts = "" if found.duel_parts is None else f"{found.duel_parts:,} "
        better = f"`{written}` was confirmed to be better than `{found.incumbent}`"
        return f"{better} on {parts}held-back parts ({evidence})"
    if found.leader == written:
        return (
            f"`{written}`, the best baseline, was written; its lead over `{found.incumbent}` was "
            f"not confirmed ({evidence})"
        )
    return (
        f"no candidate was confirmed on held-back parts: kept `{written}`; `{found.leader}` led "
        f"the search ({evidence})"
    )


def _failed(found: ContestFinding) -> list[str]:
    written = next(iter(found.scores))
    counts = {
        name: None if one.failed and one.heldout is None else one.failed
        for name, one in found.scores.items()
        if one.heldout is not None or name != written
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
    """Say how many held-out parts failed, by average; None: all of them."""
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


def effort(found: ContestFinding) -> str:
    spent = f"{found.evaluations:,} evaluation{'' if found.evaluations == 1 else 's'}"
    of = f" of {found.budget:,}" if isinstance(found.budget, int) else f" in {found.budget}"
    said = f"{spent}{of} to choose by {found.metric} ({comparative(found.goal)} is better)"
    if found.parts > 1:
        said += f", over {found.parts:,} parts"
    if found.heldout_evaluations:
        said += f"; {found.heldout_evaluations:,} held out"
    if found.failures:
        said += f"; {len(found.failures)} failed"
    return f"{said}; interrupted" if found.interrupted else said


def unspent(found: ContestFinding) -> list[str]:
    if not found.unspent or not isinstance(found.budget, int):
        return []
    left = found.budget - found.evaluations
    return [f"{left:,} of {found.budget:,} evaluations unspent: {found.unspent}"]


def _rows(found: ContestFinding) -> tuple[Rows, Rows]:
    has_failed = any(scores.failed for scores in found.scores.values())
    is_held, metric = found.heldout_parts is not None, found.metric
    columns = {
        f"selection_{metric}": f"selection {metric}",
        "parts": "of parts",
        f"heldout_{metric}": f"held-out {metric} ({found.heldout_used})" if is_held else None,
        "low": "95 % CI" if is_held else None,
        "high": None,
        "failed": "failed" if has_failed else None,
    }
    rows: Rows = []
    seen: Rows = []
    for name, scores in found.scores.items():
        interval = scores.interval
        row: dict[str, Cell] = {
            "average": name,
            f"selection_{metric}": scores.selection,
            "parts": scores.selection_parts,
            f"heldout_{metric}": scores.heldout,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
            "failed": scores.failed,
        }
        rows.append({**row, **metrics_of(scores.others, {*row, *columns.values()})})
        range_of = ends(interval.low, interval.high) if interval else ""
        seen.append({**rows[-1], "average": f"{name}{_roles(name, found)}", "low": range_of})
    return rows, titled(seen, columns)


def _roles(name: str, found: ContestFinding) -> str:
    roles = {"written": next(iter(found.scores)), "led": found.leader, "incumbent": found.incumbent}
    held = [role for role, average in roles.items() if average == name]
    return f" ({', '.join(held)})" if held else ""


def _entries(found: ContestFinding) -> Rows:
    """Return how those that competed did on the parts to choose by, best first."""
    has_dueled = any(entry.evidence is not None for entry in found.entries)
    rows: Rows = []
    for entry in found.entries:
        row: dict[str, Cell] = {
            "competed": with_K(entry.name, entry.K),
            "steps": _steps(entry),
            "parts": entry.parts,
            found.metric: entry.score,
            "±": None if entry.error is None else 1.96 * entry.error,
            "ahead": entry.ahead,
        }
        if has_dueled:
            value = entry.evidence
            row["e-value"] = None if value is None else float(f"{value:.2g}")
        rows.append({**row, "": entry.state or ""})
    return rows


def _steps(entry: ContestEntry) -> str:
    steps = [step for step in entry.selected_steps or () if step is not None]
    if len(steps) != entry.size:
        return f"{entry.size} checkpoints"
    if len(steps) <= FEW_STEPS:
        return ", ".join(map(str, steps))
    return f"{entry.size} of {steps[0]}–{steps[-1]}"


def _chart(found: ContestFinding) -> Chart:
    scores = list(found.scores.values())
    intervals = [
        None if one.interval is None else (one.interval.low, one.interval.high) for one in scores
    ]
    chosen = Dots("selection", [one.selection for one in scores], is_hollow=True, marker="s")
    held = Dots("held-out", [one.heldout for one in scores], intervals=intervals)
    dots = [held, chosen] if found.heldout_parts else [chosen]
    label = f"{found.metric} ({comparative(found.goal)} is better)"
    return Chart(
        f"{found.metric} on selection and held-out parts",
        "A row for each average with its score on held-out parts, with the 95 % interval, and on "
        "the parts it was chosen by, as in the table.",
        [rows_panel(list(found.scores), dots, label)],
    )


def _numbers(report: Report, found: ContestFinding) -> Iterator[tuple[str, float | None]]:
    written = next(iter(found.scores.values()))
    yield "selection_score", written.selection
    yield "heldout_score", written.heldout
    yield "vs_baseline", report.verdict.difference
    yield "evaluations", found.evaluations
    yield "checkpoints", report.K
    yield from ((f"metrics/{name}", value) for name, value in (written.others or {}).items())
    roles = {"incumbent": found.incumbent, "leader": found.leader}
    for role, name in {**roles, "last": "last", "uniform": "uniform"}.items():
        if name in found.scores:
            one = found.scores[name]
            yield f"{role}_score", one.selection if found.heldout_parts is None else one.heldout
