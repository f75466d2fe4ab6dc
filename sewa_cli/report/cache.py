"""The report of `sewa cache`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.shared import Head


class Run(Part):
    """What belongs to one task and its data."""

    run: str
    task: str | None = Field(description="as the folder says, and the checkpoints too")
    checkpoints: str | None
    entries: int
    bytes: int
    used: str = Field(description="when any of them was, last")


class Cached(Head):
    """What a folder of --cache holds; if it was cleared, what it held."""

    kind: Literal["cache"] = "cache"
    folder: str
    entries: int
    bytes: int
    cleared: bool
    runs: list[Run]
