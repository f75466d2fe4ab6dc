"""The view of `verify`: whether files are as their report says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.view import Rows, Table, View
from sewa_cli.present.words import upper

if TYPE_CHECKING:
    from sewa_cli.report.kinds import Verification


def view(report: Verification) -> View:
    rows: Rows = [one.model_dump(include={"path", "role", "ok", "fault"}) for one in report.files]
    seen: Rows = [
        {"role": one.role, "found": one.fault or "as it was", "path": one.path}
        for one in report.files
    ]
    said, table = verdict(report), Table("Files", seen)
    not_checked = [f"not checked: {it}" for it in report.unchecked]
    return View(
        headline=upper(said),
        caveat="; ".join(not_checked),
        says=[said, *not_checked],
        rows=rows,
        tables=[table],
    )


def verdict(report: Verification) -> str:
    count, faults = len(report.files), sum(not one.ok for one in report.files)
    if count == 1:
        are = f"the file {'is not' if faults else 'is'}"
    elif faults:
        are = f"{faults} of {count} files {'is' if faults == 1 else 'are'} not"
    else:
        are = f"the {count} files checked are" if report.unchecked else f"all {count} files are"
    return f"{are} as the report says"
