"""The report of `sewa average`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.recipe import OutputFile, Recipe
from sewa_cli.report.shared import Head, Lora


class AverageReport(Head):
    """An average that needed neither model nor data, with all that `sewa apply` needs."""

    kind: Literal["average"] = "average"
    lora: Lora | None = None
    output: str | None
    files: list[OutputFile] | None = Field(None, description="of the output, for `sewa verify`")
    recipe: Recipe
