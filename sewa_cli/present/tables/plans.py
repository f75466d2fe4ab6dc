"""Of what is known before any work: whether all fits together, and what it would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.sheet import Cell, Rows, Sheet
from sewa_cli.text import duration, number, size

if TYPE_CHECKING:
    from sewa_cli.report.forecast import Forecast, PlannedStage
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


def forecast(report: Forecast) -> Sheet:
    """Return a row for each stage; for people, the sums as well."""
    rows: Rows = [
        {
            "stage": stage.name,
            "passes": stage.passes,
            "heldout_passes": stage.heldout,
            "backward_passes": stage.backward,
            "at_least": stage.at_least,
            "is_rare": stage.is_rare,
        }
        for stage in report.stages
    ]
    seen: Rows = [
        {
            "stage": stage.name,
            "passes": _count(stage.passes),
            "held out": _count(stage.heldout),
            "BatchNorm": _count(stage.training),
            "backward": _count(stage.backward),
            "optional": _word_for(stage),
        }
        for stage in report.stages
    ]
    used = report.rows_used < report.selection_rows
    passes = f"{report.at_least:,} to {report.usual_passes:,} batches"
    if report.usual_passes < report.forward_passes:
        passes += f", rarely {report.forward_passes:,}"
    facts = {
        "task": report.task,
        "device": report.device,
        "checkpoints": f"{report.k} of {report.found} found, {report.parameters:,} parameters",
        "selection rows": f"{report.selection_rows:,}"
        + (f", of which memory holds {report.rows_used:,}" if used else ""),
        "solver": f"{report.solver}, K {report.K}",
        "tier": report.placement.tier,
        "tier reason": report.placement.reason,
        "memory": size(report.peak_memory_bytes),
        "bytes read": size(report.bytes_read),
        "forward passes": passes,
        **({"backward": f"{report.backward_passes:,} batches"} if report.backward_passes else {}),
        "one batch": duration(report.batch_seconds),
        "time": f"{duration(report.seconds)} in the model, without reading and arithmetic",
    }
    return Sheet(rows, [("", facts), ("", seen)])


def _word_for(stage: PlannedStage) -> str:
    if stage.is_rare:
        return "rare"
    return "" if stage.at_least == 1 else "in part" if stage.at_least else "yes"


def _count(number: float) -> str:
    return f"{number:,.4g}" if number else ""


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None:
        return number(None)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
