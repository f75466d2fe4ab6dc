"""The report of `sewa evaluate`."""

from __future__ import annotations

from typing import Literal

from sewa_cli.report.shared import Scores, TaskHead


class Evaluated(Scores):
    """One file, as it is."""

    path: str
    step: int | None


class Evaluation(TaskHead):
    """The report of `sewa evaluate`."""

    kind: Literal["evaluate"] = "evaluate"
    files: list[Evaluated]
    selection_rows: int
    heldout_rows: int | None
