"""Outputs that go to an object store: made in the scratch folder by the usual code, then sent."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from sewa_cli import mirrors
from sewa_cli.checkpoints.checkpoint import REPORT
from sewa_cli.checkpoints.safetensors import INDEX, SUFFIX
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.remote.places import check_url, failure
from sewa_cli.remote.scratch import ScratchFolder, scratch_for

# a folder is whole when these are there, in this order
_LAST: Final = (SUFFIX, ".distcp", INDEX, ".metadata", REPORT)


def place_output(config: Config) -> Path:
    """Return where an output is made: its own path or, if it is remote, one in the scratch."""
    path = Path(config.output or "")
    if (url := mirrors.url_of(path)) is None:
        return path
    check_url(url)
    if url.startswith(("hf:", "http")):
        raise ConfigError(f"output: {url}: is read only; write a local one and upload that")
    return scratch_for(config.scratch, config.scratch_size).add_output(url)


def upload(output: Path, report: Path | None, force: bool) -> None:
    """Send an output and its report, if they are remote.

    The weights come after the other files, then the index and the report. A folder or report that
    is replaced is removed first, so that nothing describes other files.
    """
    scratch = mirrors.mirror_of(output)
    if not isinstance(scratch, ScratchFolder):
        return
    fs, place = scratch.outputs[output]
    if report is not None and mirrors.mirror_of(report) is None:
        report = None  # it was named, and is local
    folder = place.rpartition("/")[0]
    sent: list[str] = []
    try:
        old = scratch.give_up(output)
        if not force and (old or fs.exists(place)):
            raise OutputError(f"{output}: appeared while sewa was working; use --force")
        stale = [*(old if output.is_dir() else ()), *scratch.removed(output.parent)]
        if report is not None:
            stale += scratch.give_up(report)
        for name in sorted(stale, key=_rank, reverse=True):
            fs.rm_file(name)
        files = [output, *output.rglob("*")]
        for path in sorted(filter(Path.is_file, files), key=lambda path: _rank(path.name)):
            inside = path.relative_to(output).as_posix()
            target = place if path == output else f"{place}/{inside}"
            sent.append(target)
            fs.put_file(str(path), target)
        if report is not None:
            fs.put_file(str(report), f"{folder}/{report.name}")
    except BaseException as error:
        for name in sent if output.is_dir() else ():
            with suppress(Exception):
                fs.rm_file(name)
        if not isinstance(error, Exception):
            raise
        raise failure(str(output), error, OutputError) from error


def _rank(name: str) -> tuple[int, str]:
    return max((n for n, end in enumerate(_LAST) if name.endswith(end)), default=-1), name
