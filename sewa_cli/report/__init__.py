"""The JSON reports: one model for every command, all with the same head.

A module for each kind; import from them, so that nobody waits for the models of others. `sewa
schema KIND` prints the JSON Schema. A change that drops or renames a key raises SCHEMA_VERSION.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sewa_cli.report.shared import Head

# kind of report (and its module here) → its model
KINDS: Final = {
    "select": "Report",
    "forecast": "Forecast",
    "compare": "Comparison",
    "evaluate": "Evaluation",
    "inspect": "Inspection",
    "validate": "Validation",
    "average": "AverageReport",
    "verify": "Verification",
}


def model_of(kind: str) -> type[Head]:
    model: type[Head] = getattr(import_module(f"sewa_cli.report.{kind}"), KINDS[kind])
    return model
