"""The report of `sewa verify`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.shared import Head

Role = Literal["output", "source"]


class Checked(Part):
    """A file of the output, or a checkpoint that went into it."""

    path: str
    role: Role
    ok: bool
    fault: str | None = None


class Verification(Head):
    """Whether an output and its sources are what their report says."""

    kind: Literal["verify"] = "verify"
    report: str
    files: list[Checked]
    unchecked: list[str] = Field(description="what could not be checked, or was not to be")
