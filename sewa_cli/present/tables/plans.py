"""Of what is known before any work: whether all fits together, and what it would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.sheet import Cell, Ordered, Rows, Sheet, sized
from sewa_cli.text import duration, number, size

if TYPE_CHECKING:
    from sewa_cli.report.forecast import Forecast
    from sewa_cli.report.shared import TaskHead


def facts(report: TaskHead) -> Sheet:
    """Everything but the head, by name: one row for programs, a line each for people."""
    head = {"schema_version", "kind", "versions", "created", "command", "config", "warnings"}
    head |= {"seed", "code"}
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
                "reads": sized(plan.bytes_read),
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
