"""`sewa report`: the page of a report that was written before, by anybody."""

from __future__ import annotations

from pathlib import Path

from sewa_cli.config import STDOUT
from sewa_cli.errors import OutputError
from sewa_cli.events import Events
from sewa_cli.files import real
from sewa_cli.present.page import WITHOUT_PICTURES, has_pictures, page
from sewa_cli.publish import new_output
from sewa_cli.report.reading import read_any


def run_report(source: Path, target: Path, force: bool, events: Events) -> str:
    """Return the page; write it, unless it is to go to standard output."""
    if real(target) == real(source):
        raise OutputError(f"{target}: is the report itself, which is never overwritten")
    report = read_any(source)
    if not has_pictures():
        events.show_warning(f"the page is {WITHOUT_PICTURES}")
    with events.stage("drawing"):
        text = page(report, str(source))
    if str(target) != STDOUT:
        with new_output(target, force) as file:
            file.write(text.encode())
    return text
