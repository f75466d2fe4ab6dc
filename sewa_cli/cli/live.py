"""The page of a run that is still under way: written anew as stages end, for a browser to reload.

It first appears when the first stage has ended, so that what is refused at once leaves nothing. A
run that fails or is interrupted leaves a page that says so. One that is killed cannot: its page
says when it was written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sewa_cli.cli.progress import Stage
from sewa_cli.errors import OutputError, SewaError
from sewa_cli.text import duration, one_line

REFRESH: Final = 3  # seconds between two looks of a browser
PAUSE: Final = 1.0  # seconds between two pages, where stages end one upon the other
BEAT: Final = 5.0  # and while one lasts


class LivePage:
    def __init__(self, path: Path, force: bool, command: str | None) -> None:
        self.path = path
        self.fault: str | None = None  # why it is not kept up
        self._force = force
        self._command = command
        self._began = self._written = time.monotonic()
        self._is_there = False
        self._ended: dict[str, tuple[str, float]] = {}  # name → how much, how long

    def progress(self, here: Stage, under_way: Sequence[Stage], warnings: Sequence[str]) -> None:
        """What a stage has just reported."""
        now = time.monotonic()
        ends = here.has_ended and here.depth == 0
        if ends:
            _, before = self._ended.pop(here.name, ("", 0.0))
            self._ended[here.name] = (here.count, before + now - here.began)
        wait = PAUSE if ends else BEAT
        if (ends and not self._is_there) or (self._is_there and now - self._written >= wait):
            current = under_way[0].name if under_way else "working"
            self._try(
                headline=f"Running: {current}",
                answer="This page is written anew while the run goes on; a browser that shows it "
                f"reloads it every {REFRESH} seconds, until it is done.",
                refresh=REFRESH,
                stages=[*self._done(), *(_open(stage, now) for stage in under_way)],
                warnings=warnings,
            )

    def stop(self, error: BaseException, warnings: Sequence[str]) -> None:
        """What ended the run early; nothing if the page has not appeared yet."""
        if not self._is_there:
            return
        faults = list(error.faults) if isinstance(error, SewaError) else [one_line(error, 500)]
        interrupted = isinstance(error, KeyboardInterrupt)
        self._try(
            headline="Interrupted" if interrupted else "Failed",
            answer="The run ended before it was done; nothing half-written is left of it.",
            refresh=None,
            stages=self._done(),
            faults=[] if interrupted else [fault for fault in faults if fault],
            warnings=warnings,
        )

    def finish(self, text: str) -> None:
        self._write(text)

    def _done(self) -> list[dict[str, object]]:
        return [
            {"name": name, "state": "done", "depth": 0, "total": 1, "done": 1}
            | {"said": f"{count.removeprefix(name).strip()} done in {duration(seconds)}"}
            for name, (count, seconds) in self._ended.items()
        ]

    def _try(self, **known: object) -> None:
        """A page that cannot be kept up is no reason to end the work."""
        from sewa_cli.present.page import running

        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        elapsed = duration(time.monotonic() - self._began)
        shared: dict[str, object] = {
            "about": f"{now}, {elapsed} after the start",
            "command": self._command,
            "faults": [],
            "footer": f"Written {now} by process {os.getpid()}. If the run is killed, this page "
            "cannot say so.",
        }
        try:
            self._write(running(**{**shared, **known}))
        except OutputError as error:
            self.fault = str(error)
            self._is_there = False

    def _write(self, text: str) -> None:
        from sewa_cli.output.publication import write_file

        # once it is ours it may be replaced
        force = self._force or self._is_there
        write_file(self.path, lambda file: file.write(text.encode()), force)
        self._is_there, self._written = True, time.monotonic()


def _open(stage: Stage, now: float) -> dict[str, object]:
    elapsed = now - stage.began
    said = [stage.count.removeprefix(stage.name).strip(), stage.now, f"{duration(elapsed)} so far"]
    if stage.done and stage.total > stage.done:
        left = elapsed / stage.done * (stage.total - stage.done)
        said.append(f"about {duration(left)} left")
    return {
        "name": stage.name,
        "state": "open",
        "depth": stage.depth,
        "total": stage.total,
        "done": stage.done,
        "said": ", ".join(part for part in said if part),
    }
