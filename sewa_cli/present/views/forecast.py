"""The view of `select --dry-run`: what the run will read, hold and compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.view import Facts, Rows, Table, View
from sewa_cli.text import duration, size

if TYPE_CHECKING:
    from sewa_cli.report.kinds import Forecast, PlannedStage


def view(report: Forecast) -> View:
    rows: Rows = [
        {
            "stage": stage.name,
            "passes": stage.passes,
            "heldout_passes": stage.heldout,
            "backward_passes": stage.backward,
            "at_least": stage.at_least,
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
            "optional": _optional(stage),
        }
        for stage in report.stages
    ]
    facts, stages = Facts(_facts(report)), Table("Stages", seen)
    said = []
    if not report.is_declared:
        said = [f"{report.solver}: declares no plan, so what it takes itself is not counted"]
    return View(
        headline="What the run will take",
        caveat="; ".join([f"{duration(report.seconds)} in the model", *said]),
        says=said,
        rows=rows,
        tables=[facts, stages],
    )


def _facts(report: Forecast) -> dict[str, str]:
    passes = f"{report.at_least:,} to {report.forward_passes:,} batches"
    used = f"{report.selection_rows:,}"
    if report.rows_used < report.selection_rows:
        used += f", of which memory holds {report.rows_used:,}"
    return {
        "task": report.task,
        "device": report.device,
        "checkpoints": f"{report.k} of {report.found} found, {report.parameters:,} parameters",
        "selection rows": used,
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


def _optional(stage: PlannedStage) -> str:
    return "" if stage.at_least == 1 else "in part" if stage.at_least else "yes"


def _count(number: float) -> str:
    return f"{number:,.4g}" if number else ""
