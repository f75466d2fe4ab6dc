"""Reports as sheets of rows: a function for each kind of report, of its name."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sewa_cli.present.sheet import Cell, Ordered, Rows, Sheet, plain
from sewa_cli.report.part import to_json
from sewa_cli.text import duration, few, number, size, with_K

if TYPE_CHECKING:
    from sewa_cli.report.cache import Cached
    from sewa_cli.report.compare import Comparison, Row
    from sewa_cli.report.evaluate import Evaluation
    from sewa_cli.report.forecast import Forecast
    from sewa_cli.report.inspect import Found, Inspection, Motion
    from sewa_cli.report.select import Report
    from sewa_cli.report.shared import Head, Interval, TaskHead
    from sewa_cli.report.verify import Verification
    from sewa_cli.report.windows import Windows

LOSS = {"heldout_loss": "held-out loss", "selection_loss": "selection loss"}


def show(report: Head, form: str) -> str:
    """By the function here that is named like the report's kind."""
    if form == "json":
        return to_json(report)
    sheet: Sheet = globals()[report.kind](report)
    return sheet.show(form)


def _metrics(found: Mapping[str, float | None] | None, taken: Container[str]) -> dict[str, Cell]:
    """A metric that is named like a column of ours must not take its place."""
    named: dict[str, Cell] = {}
    for metric, value in (found or {}).items():
        name = metric
        while name in taken or (name != metric and name in (found or {})):
            name = f"metric_{name}"
        named[name] = value
    return named


def _size(count: int) -> Ordered:
    return Ordered(size(count), count)


def listing(found: Mapping[str, Mapping[str, Any]]) -> Sheet:
    """What there is to choose from: names, a line about each, and what else is known."""
    rows: Rows = []
    seen: Rows = []
    for name, about in found.items():
        options = about.get("options", {})
        given = " ".join(f"{key}={value}" for key, value in options.items())
        row: dict[str, Cell] = {"name": name, **about}
        rows.append({**row, "options": given} if "options" in about else row)
        known = "".join(f" [{key}={value}]" for key, value in options.items())
        seen.append({"name": name, "what it does": f"{about['line']}{known}"})
    return Sheet(rows, [("", seen)])


def select(report: Report) -> Sheet:
    """The average beside its references."""
    chosen = {}
    if report.instead_of and report.learned:
        chosen = {report.instead_of: report.learned}
    elif report.written not in report.references:
        chosen = {report.written: report.average}
    best = next(iter(report.references), None)
    titles = {"uniform": f"uniform (all {report.k})"}
    if best is not None:
        titles[best] = f"{titles.get(best, best)} (best simple)"
    expected = {}
    if report.expected:  # of what was learned, and of the simple average that folds would choose
        expected = {next(iter(chosen), ""): report.expected.loss}
        if report.expected.by is not None:
            expected[best or ""] = report.expected.loss + report.expected.by
    rows: Rows = []
    seen: Rows = []
    for name, scores in {**chosen, **report.references}.items():
        losses: dict[str, Cell] = {"selection_loss": scores.selection_loss}
        cells: dict[str, Cell] = {
            "average": titles.get(name, name),
            f"selection loss ({report.selection_rows})": scores.selection_loss,
        }
        if expected:
            losses["expected_loss"] = cells["expected loss"] = expected.get(name)
        losses["heldout_loss"] = scores.heldout_loss
        if report.heldout_rows is not None:
            cells[f"held-out loss ({report.heldout_rows})"] = scores.heldout_loss
        metrics = _metrics(scores.metrics, {*cells, *losses})
        rows.append({"average": name, **losses, **metrics})
        seen.append({**cells, **metrics})
    return Sheet(rows, [("", seen)])


def evaluate(report: Evaluation) -> Sheet:
    rows: Rows = []
    for file in report.files:
        row: dict[str, Cell] = {"path": file.path, "step": file.step}
        row["selection_loss"] = file.selection_loss
        if report.heldout_rows is not None:
            row["heldout_loss"] = file.heldout_loss
        rows.append({**row, **_metrics(file.metrics, row)})
    return Sheet(rows)


def compare(report: Comparison) -> Sheet:
    """A row for each method at each K."""
    rows = [_compared(row) for row in report.rows]
    # for people: an interval is one column, names are short, and no column says nothing
    said = {name for row in rows for name, cell in row.items() if cell is not None or name == "K"}
    seen: Rows = []
    for row in rows:
        cells = {name: cell for name, cell in row.items() if name in said}
        for low, high in (("low", "high"), ("minus_best_low", "minus_best_high")):
            if cells.pop(high, None) is not None and isinstance(lowest := row[low], float):
                cells[low] = Ordered(f"{plain(lowest)} .. {plain(row[high])}", lowest)
        seen.append({_SHORT.get(name, name): cell for name, cell in cells.items()})
    return Sheet(rows, [("", seen)])


_SHORT = {
    "selection_loss": "selection",
    "predicted_loss": "predicted",
    "surrogate_error": "off by",
    "heldout_loss": "held-out",
    "low": "95 %",
    "minus_best": "minus best",
    "minus_best_low": "95 % of that",
    "MB_read": "MB read",
}


def _compared(row: Row) -> dict[str, Cell]:
    found: dict[str, Cell] = {
        "method": row.method,
        "K": row.K,
        "size": row.size,
        "selection_loss": row.selection_loss,
        "predicted_loss": row.predicted_loss,
        "surrogate_error": row.surrogate_error,
        "heldout_loss": row.heldout_loss,
        **_ends("", row.interval),
        "spread": row.spread,
        "minus_best": row.difference,
        **_ends("minus_best_", row.difference_interval),
        "mark": row.mark,
    }
    cost: dict[str, Cell] = {
        "forward": row.cost.forward_passes,
        "backward": row.cost.backward_passes,
        "MB_read": round(row.cost.bytes_read / 1e6, 3),
        "seconds": round(row.cost.seconds, 3),
    }
    return {**found, **_metrics(row.metrics, {*found, *cost, *_SHORT.values()}), **cost}


def _ends(name: str, interval: Interval | None) -> dict[str, Cell]:
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}low": low, f"{name}high": high}


def windows(report: Windows) -> Sheet:
    """For programs a row for each method in each window; for people methods side by side."""
    shared = {"method", "K", "size", "selection_loss", "heldout_loss", "spread"}
    rows: Rows = []
    for i, window in enumerate(report.windows):
        for row in window.rows:
            cells: dict[str, Cell] = {
                "window": i,
                **window.model_dump(include={"at", "first_step", "last_step"}),
                **row.model_dump(include=shared),
                "best": row.mark == "best",
            }
            rows.append({**cells, **_metrics(row.metrics, cells)})
    return Sheet(rows, list(_side_by_side(report)))


def level(report: Windows) -> str:
    """held-out loss 0.3 at step 5,000"""
    where = "step" if report.by == "step" else "checkpoint"
    loss = number(report.level.value)
    return f"{LOSS[report.level.measure]} {loss} at {where} {report.level.at:,}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _side_by_side(report: Windows) -> Iterator[tuple[str, Rows]]:
    """Windows as rows, methods as columns, by loss and by each metric; then who got there when."""
    measure = report.level.measure
    unit = "after step" if report.by == "step" else "checkpoints"
    by_loss: Rows = []
    for window in report.windows:
        cells: dict[str, Cell] = {unit: window.at}
        cells |= {with_K(row.method, row.K): getattr(row, measure) for row in window.rows}
        best = [with_K(row.method, row.K) for row in window.rows if row.mark == "best"]
        by_loss.append({**cells, "lowest": ", ".join(best) or None})
    yield f"{LOSS[measure]}, in windows of {report.size} checkpoints", by_loss
    every = [row for window in report.windows for row in window.rows]
    metrics = list(dict.fromkeys(name for row in every for name in row.metrics or {}))
    for metric in metrics:
        by_metric: Rows = [
            {unit: window.at}
            | {with_K(row.method, row.K): (row.metrics or {}).get(metric) for row in window.rows}
            for window in report.windows
        ]
        yield metric, by_metric
    whens: Rows = []
    for reach in report.reaches:
        when: dict[str, Cell] = {
            "method": with_K(reach.method, reach.K),
            "after step" if report.by == "step" else "after checkpoints": (
                "never" if reach.at is None else Ordered(f"{reach.at:,}", reach.at)
            ),
            "of training": (
                None if reach.share is None else Ordered(percent(reach.share), reach.share)
            ),
            LOSS[measure].removesuffix(" loss"): reach.loss,
        }
        there = reach.metrics or {}
        when |= _metrics({name: there.get(name) for name in metrics}, {*when, "first touched"})
        touched = None if reach.touched is None else report.windows[reach.touched].at
        whens.append({**when, "first touched": touched})
    yield f"when the last checkpoint's level is reached and kept: {level(report)}", whens


def inspect(report: Inspection) -> Sheet:
    """The facts, a row for each checkpoint, the run beside three simple ways of moving."""
    found = report.checkpoints
    losses = dict.fromkeys(name for one in found for name in one.logged if "loss" in name)
    rows: Rows = []
    seen: Rows = []
    for one in found:
        twin = None if one.same_as is None else found[one.same_as]
        cells = one.model_dump(exclude={"logged", "nonfinite", "same_as"})
        cells |= {"nonfinite": len(one.nonfinite), "same_as": twin and twin.path}
        rows.append({**cells, **_metrics(one.logged, cells)})
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
                "size": _size(one.size),
                "file": one.path,
                "note": "; ".join(notes),
            }
        )
    ways = [] if report.motion is None else [("", _ways(report.motion))]
    facts = ("", _facts_of_run(report))
    return Sheet(rows, [facts, ("", seen), *ways, ("", report.explanation)])


def _facts_of_run(report: Inspection) -> dict[str, str]:
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


def _ways(motion: Motion) -> Rows:
    titles = {"line": "straight line", "walk": "random walk", "noise": "noise around a point"}
    ways = {"this run": motion.run}
    ways |= {titles[name]: signs for name, signs in (motion.expected or {}).items()}
    return [
        {"": "net displacement / path", **{way: signs.net_to_path for way, signs in ways.items()}},
        {"": "mean cosine of steps", **{way: signs.cosine for way, signs in ways.items()}},
        {"": "explained by a line", **{way: signs.trend for way, signs in ways.items()}},
    ]


def _name(one: Found) -> str:
    return one.path if one.step is None else f"step {one.step}"


def verify(report: Verification) -> Sheet:
    """A row for each file."""
    rows: Rows = [one.model_dump(include={"path", "role", "ok", "fault"}) for one in report.files]
    read: Rows = [
        {"role": one.role, "found": one.fault or "as it was", "path": one.path}
        for one in report.files
    ]
    return Sheet(rows, [("", read)])


def cache(report: Cached) -> Sheet:
    """A row for each run."""
    rows: Rows = [one.model_dump() for one in report.runs]
    read: Rows = [
        {
            "run": one.run,
            "entries": one.entries,
            "size": _size(one.bytes),
            "last used": one.used,
            "task": one.task,
            "checkpoints": one.checkpoints,
        }
        for one in report.runs
    ]
    return Sheet(rows, [("", read)] if read else [])


def facts(report: TaskHead) -> Sheet:
    """Everything but the head, by name: one row for programs, a line each for people."""
    head = {"schema_version", "kind", "versions", "created", "command", "config", "warnings"}
    head |= {"seed"}
    found = report.model_dump(exclude=head)
    for name, value in found.pop("placement", {}).items():
        found["tier reason" if name == "reason" else name] = value
    row: dict[str, Cell] = {}
    seen: dict[str, str] = {}
    for name, value in found.items():
        row[name.replace(" ", "_")] = ", ".join(value) if isinstance(value, list) else value
        is_size = name.endswith(("_bytes", "bytes_read"))
        seen[name.replace("_", " ")] = size(value) if is_size else _word(value)
    return Sheet([row], [("", seen)])


validate = facts


PLANNED = {"solver", "K", "rows_used", "bytes_read", "forward_passes", "backward_passes"}
PLANNED |= {"at_most", "peak_memory_bytes", "fits", "too_few", "seconds"}


def forecast(report: Forecast) -> Sheet:
    """A row for each solver, the chosen one first; for people, what is known of the run besides."""
    plans = [report, *report.alternatives]
    rows: Rows = []
    read: Rows = []
    for plan in plans:
        found = plan.model_dump(include=PLANNED)
        placed = plan.placement
        there = "" if plan.fits else " (not here)"
        rows.append(
            {
                **found,
                "tier": placed.tier,
                "cap_bytes": placed.cap_bytes,
                "planned_bytes": placed.planned_bytes,
                "k": report.k,
                "ranks": report.ranks,
                "how": report.how,
            }
        )
        read.append(
            {
                "solver": plan.solver,
                "K": str(plan.K),
                "rows": plan.rows_used,
                "tier": placed.tier,
                "reads": _size(plan.bytes_read),
                "forward": plan.forward_passes,
                "backward": plan.backward_passes,
                "memory": Ordered(f"{size(plan.peak_memory_bytes)}{there}", plan.peak_memory_bytes),
                "time": Ordered(duration(plan.seconds), plan.seconds),
            }
        )
    tokens = "" if report.tokens is None else f", {report.tokens:,} tokens"
    heldout = "" if report.heldout_rows is None else f", {report.heldout_rows:,} held out"
    facts = {
        "task": report.task,
        "device": report.device,
        **({"each of": f"{report.ranks} ranks"} if report.ranks > 1 else {}),
        "checkpoints": f"{report.k} of {report.parameters:,} parameters",
        "selection rows": f"{report.selection_rows:,}{tokens}{heldout}",
        "forward passes": str(report.forward_passes),
        "bytes read": size(report.bytes_read),
        "tier": report.placement.tier,
        "tier reason": report.placement.reason,
        "model": size(report.model_bytes),
        "one batch": size(report.batch_bytes),
        "how": f"{report.how}: {report.why}",
    }
    return Sheet(rows, [("", facts), ("", read)])


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None:
        return number(None)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
