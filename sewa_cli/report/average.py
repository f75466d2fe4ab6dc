"""The report of `sewa average`."""

from __future__ import annotations

from typing import Literal

from sewa_cli.report.recipe import Recipe
from sewa_cli.report.shared import Head, Lora


class AverageReport(Head):
    """What went into an average that needed neither model nor data; enough for `sewa apply`."""

    kind: Literal["average"] = "average"
    lora: Lora | None = None
    output: str | None
    recipe: Recipe
