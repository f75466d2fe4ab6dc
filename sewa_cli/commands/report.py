"""`sewa report`: a page of reports that were written before, by anybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sewa_cli.config import STDOUT
from sewa_cli.errors import CheckpointError, ConfigError, OutputError, SewaError
from sewa_cli.events import Events
from sewa_cli.files import real
from sewa_cli.output.publication import write_file
from sewa_cli.present.page import WITHOUT_PICTURES, has_pictures, page
from sewa_cli.report.fit import misfit
from sewa_cli.report.part import to_json
from sewa_cli.report.reading import read_any


def run_report(reports: Sequence[Path], target: Path, force: bool, events: Events) -> str:
    """The page, written where it is to go, unless that is standard output."""
    if real(target) in map(real, reports):
        raise OutputError(f"{target}: is one of the reports, which are never overwritten")
    for path, times in Counter(map(real, reports)).items():
        if times > 1:  # a mean would take it for several runs
            raise ConfigError(f"{path}: is given {times} times")
    found = [read_any(path) for path in events.over("reading", reports, len(reports))]
    seen: dict[str, Path] = {}
    for path, report in zip(reports, found, strict=True):
        if fault := misfit(report):
            raise CheckpointError(f"{path}: its parts do not fit together ({fault}); is it intact?")
        if (first := seen.setdefault(to_json(report), path)) is not path:
            raise ConfigError(f"{path}: is the same report as {first}")
    if not has_pictures():
        events.show_warning(f"the page is {WITHOUT_PICTURES}")
    try:
        with events.stage("drawing"):
            text = page(*found, names=[str(path) for path in reports])
    except SewaError:
        raise
    except Exception as error:  # each fits its model, but not in itself: an index that is none
        named = ", ".join(map(str, reports))
        kind = type(error).__name__
        raise CheckpointError(
            f"{named}: its parts do not fit together ({kind}); is it intact?"
        ) from error
    if str(target) != STDOUT:
        write_file(target, lambda file: file.write(text.encode()), force)
    return text
