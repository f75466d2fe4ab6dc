"""The report of `sewa average`."""

from __future__ import annotations

from typing import Literal

from sewa_cli.report.recipe import Recipe
from sewa_cli.report.shared import Head


class Averaging(Head):
    """The report of `sewa average`: enough for `sewa apply`."""

    kind: Literal["average"] = "average"
    output: str | None
    recipe: Recipe
