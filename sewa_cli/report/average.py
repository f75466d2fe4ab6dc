"""The report of `sewa average`."""

from __future__ import annotations

from typing import Any, Literal

from sewa_cli.report.part import SCHEMA_VERSION, Part
from sewa_cli.report.recipe import Recipe
from sewa_cli.report.shared import Lora, Versions


class AverageReport(Part):
    """What went into an average that needed neither model nor data."""

    kind: Literal["average"] = "average"
    schema_version: int = SCHEMA_VERSION
    versions: Versions
    created: str
    config: dict[str, Any]
    lora: Lora | None = None
    output: str
    recipe: Recipe
    warnings: list[str]
