"""What people read while and after a run, all of it on stderr."""

from __future__ import annotations

import gc
import shlex
import sys
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from sewa_cli.cli.main import stop_if_interrupted, typed
from sewa_cli.events import Listener

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Talk(Listener):
    """Progress bars on a terminal only; `quiet` leaves errors alone; `verbose` adds notes.

    A plain line is written as it is. rich is for what has a colour, a bar or columns: to import it
    takes as long as to average a small network's files.
    """

    def __init__(self, quiet: bool, verbose: bool) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self.command = shlex.join(["sewa", *typed])
        self._bars: Progress | None = None
        self._stages: dict[str, TaskID] = {}

    @cached_property
    def console(self) -> Console:
        from sewa_cli.cli.screen import make_console

        return make_console(self._quiet)

    def __enter__(self) -> Talk:
        if not gc.isenabled():  # as `__main__` leaves it: all is imported now, the work begins
            gc.freeze()
            gc.enable()
        stop_if_interrupted()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def note(self, text: str) -> None:
        if self._verbose:
            self.console.print(text, style="dim")

    def say(self, text: str) -> None:
        if self._bars is not None:  # it stands above them
            self.console.print(text)
        elif not self._quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow")

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        stop_if_interrupted()
        if self._quiet or not sys.stderr.isatty():
            return
        if self._bars is None:
            from sewa_cli.cli.screen import make_bars

            self._bars = make_bars(self.console)
            self._bars.start()
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=total, loss="")
        shown = "" if loss is None else f"loss {loss:.4f}"
        self._bars.update(self._stages[stage], completed=done, loss=shown)
