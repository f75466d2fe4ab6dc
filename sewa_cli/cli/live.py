"""The page of a run that is still under way: written anew as stages end, for a browser to reload.

It first appears when the first stage has ended, so that what is refused at once leaves nothing. A
run that fails or is interrupted leaves a page that says so. One that is killed cannot: its page
says when it was written. Each is marked as unfinished, and so may be replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sewa_cli.cli.pictures import may_replace
from sewa_cli.cli.progress import Stage
from sewa_cli.errors import OutputError, SewaError
from sewa_cli.text import duration, one_line

REFRESH: Final = 3  # seconds between two looks of a browser
PAUSE: Final = 1.0  # seconds between two pages, where stages end one upon the other
BEAT: Final = 5.0  # and while one lasts
_SO_FAR: Final = " so far"


class LivePage:
    def __init__(self, path: Path, force: bool, command: str | None) -> None:
        self.path = path
        self.is_done = False  # the report's page has taken its place
        self._force = force
        self._command = command
        self._began = self._tried = time.monotonic()
        self._is_begun = False  # the first stage has ended
        self._is_over = False
        self._current = ""  # the stage that the page says is under way
        self._ended: dict[str, tuple[str, float]] = {}  # name → how much, how long

    def progress(
        self, here: Stage, under_way: Sequence[Stage], warnings: Sequence[str]
    ) -> str | None:
        """What a stage has just reported. Returns why the page could not be written, if so."""
        now = time.monotonic()
        self._began = min(self._began, here.began)  # the task is loaded before there is a page
        ends = here.has_ended and here.depth == 0
        if ends:
            _, before = self._ended.pop(here.name, ("", 0.0))
            self._ended[here.name] = (here.count, before + now - here.began)
        current = under_way[0].name if under_way else ""
        is_new = current not in ("", self._current)  # it may last, and report nothing
        wait = 0.0 if is_new else PAUSE if ends else BEAT
        if not (now - self._tried >= wait if self._is_begun else ends):
            return None
        self._is_begun, self._current = True, current
        return self._try(
            headline=f"Running: {current}" if current else f"Running: {here.name} is done",
            answer="This page is written anew while the run goes on; a browser that shows it "
            f"reloads it every {REFRESH} seconds, until it is done.",
            refresh=REFRESH,
            stages=[*self._done(), *(_open(stage, now) for stage in under_way)],
            warnings=warnings,
        )

    def stop(
        self, error: BaseException | None, under_way: Sequence[Stage], warnings: Sequence[str]
    ) -> None:
        """What ended the run early; nothing if there is no page yet, or the last one."""
        if not self._is_begun or self._is_over:
            return
        self._is_over = True
        faults: list[str] = []
        headline = "Ended without a page"
        answer = "The run is over, and has nothing to show here."
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            headline = "Interrupted" if interrupted else "Failed"
            answer = "The run ended before it was done; nothing half-written is left of it."
            if isinstance(error, SewaError):
                faults = list(error.faults)
            elif not interrupted:
                faults = [one_line(error, 500)]
        now = time.monotonic()
        self._try(
            headline=headline,
            answer=answer,
            refresh=None,
            stages=[
                *self._done(),
                *(_open(stage, now, ", then it stopped") for stage in under_way),
            ],
            faults=[fault for fault in faults if fault],
            warnings=warnings,
        )

    def finish(self, text: str) -> None:
        self._write(text)
        self.is_done = self._is_over = True

    def give_up(self, why: str, warnings: Sequence[str]) -> None:
        """The run is done, and only its page could not be made."""
        self._is_over = True
        self._try(
            headline="Done, without its page",
            answer="The run is done, and all else that it writes is there. This page could not be "
            "made of its report.",
            refresh=None,
            stages=self._done(),
            faults=[why],
            warnings=warnings,
        )

    def _done(self) -> list[dict[str, object]]:
        return [
            {"name": name, "state": "done", "depth": 0, "total": 1, "done": 1}
            | {"said": f"{count.removeprefix(name).strip()} done in {duration(seconds)}"}
            for name, (count, seconds) in self._ended.items()
        ]

    def _try(self, **known: object) -> str | None:
        """A page that cannot be kept up is no reason to end the work; the next may succeed."""
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
        self._tried = time.monotonic()
        try:
            self._write(running(**{**shared, **known}))
        except OutputError as error:
            return str(error)
        return None

    def _write(self, text: str) -> None:
        from sewa_cli.output.publication import write_file

        force = may_replace(self.path, self._force)
        write_file(self.path, lambda file: file.write(text.encode()), force)


def _open(stage: Stage, now: float, end: str = _SO_FAR) -> dict[str, object]:
    elapsed = now - stage.began
    said = [stage.count.removeprefix(stage.name).strip(), stage.now, f"{duration(elapsed)}{end}"]
    if end == _SO_FAR and stage.done and stage.total > stage.done:
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
