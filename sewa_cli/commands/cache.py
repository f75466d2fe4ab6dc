"""`sewa cache`: what a folder of --cache holds, and how to be rid of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from sewa_cli import store
from sewa_cli.config import Config
from sewa_cli.errors import OutputError
from sewa_cli.events import Events
from sewa_cli.report.cache import Cached, Run
from sewa_cli.session import heading


def run_cache(folder: Path, *, clear: bool = False, events: Events | None = None) -> Cached:
    """Shows it; then, if it is to be, clears it of all that is ours."""
    try:
        found = store.groups(folder)
        if clear:
            store.clear(folder)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror or error}") from error
    runs = [
        Run(
            run=group.name,
            task="hashes of files" if group.name == store.FILES else group.about.get("task"),
            checkpoints=group.about.get("checkpoints"),
            entries=group.entries,
            bytes=group.bytes,
            used=datetime.fromtimestamp(group.used, UTC).isoformat(timespec="seconds"),
        )
        for group in found
    ]
    return Cached(
        **heading(Config(), events or Events()),
        folder=str(folder),
        entries=sum(run.entries for run in runs),
        bytes=sum(run.bytes for run in runs),
        cleared=clear,
        runs=runs,
    )
