"""The JSON reports: one model for every command, all with the same head.

`sewa schema KIND` prints the JSON Schema. A change that drops or renames a key raises
SCHEMA_VERSION.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sewa_cli.report.shared import ReportHead

KINDS: Final = {  # kind of report → its model
    "select": "Report",
    "forecast": "Forecast",
    "compare": "Comparison",
    "evaluate": "Evaluation",
    "inspect": "Inspection",
    "validate": "Validation",
    "average": "AverageReport",
    "verify": "Verification",
}


def model_of(kind: str) -> type[ReportHead]:
    module = "select" if kind == "select" else "kinds"
    model: type[ReportHead] = getattr(import_module(f"sewa_cli.report.{module}"), KINDS[kind])
    return model
