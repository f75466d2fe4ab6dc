"""What people read while and after a run, all of it on stderr."""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sewa_cli.cli.main import typed
from sewa_cli.errors import CheckpointError
from sewa_cli.events import Events
from sewa_cli.interrupts import stop_if_interrupted
from sewa_cli.text import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SECONDS: Final = 30.0  # between two lines of progress, where there is no terminal for bars


def check_one_a_line(paths: Iterable[Path], advice: str) -> None:
    """Refuse, before any work, paths that whoever reads what we print would take for others."""
    for path in paths:
        if str(path).splitlines() != [str(path)]:
            raise CheckpointError(
                f"{path}: has a line break in its name, and paths are printed one a line; {advice}"
            )


class Talk(Events):
    """Bars on a terminal, else a line now and then; `quiet` leaves errors; `verbose` adds notes.

    Whatever names are in it, a line is one line and moves no cursor. rich is for what has a colour
    or a bar: to import it takes as long as to average a small network's files.
    """

    def __init__(self, quiet: bool, verbose: bool) -> None:
        super().__init__()
        self._quiet = quiet
        self._verbose = verbose
        self.command = shlex.join(["sewa", *typed])
        self._bars: Progress | None = None
        self._stages: dict[str, TaskID] = {}
        self._last_line = time.monotonic()
        self.one_a_line = False  # the paths of checkpoints are to be printed so

    def __enter__(self) -> Talk:
        if not gc.isenabled():  # as `__main__` leaves it: all is imported now, the work begins
            gc.freeze()
            gc.enable()
        stop_if_interrupted()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def found(self, paths: Sequence[Path]) -> None:
        if self.one_a_line:
            check_one_a_line(paths, "--print0 ends them with a NUL byte, for xargs -0")

    def note(self, text: str) -> None:
        if self._verbose:
            self._console.print(shown(text), style="dim")

    def say(self, *lines: str) -> None:
        for line in map(shown, lines):
            if self._bars is not None:  # it stands above them
                self._console.print(line)
            elif not self._quiet:
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def show_warning(self, text: str) -> None:
        self._console.print(f"warning: {shown(text)}", style="yellow")

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        stop_if_interrupted()
        if self._quiet:
            return
        now = "" if loss is None else f"loss {loss:.4f}"
        if sys.stderr.isatty():
            bars = self._bars or self._start_bars()
            if stage not in self._stages:
                self._stages[stage] = bars.add_task(shown(stage), total=total, loss="")
            bars.update(self._stages[stage], completed=done, loss=now)
        elif time.monotonic() - self._last_line >= SECONDS:
            self._last_line = time.monotonic()
            self.say(f"{stage} {done}/{total} {now}".rstrip())

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(
            stderr=True,
            quiet=self._quiet,
            soft_wrap=True,
            highlight=False,
            # paths and names are shown as they are: `[x]` is no style, `:x:` no picture
            markup=False,
            emoji=False,
        )

    def _start_bars(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description:>10}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bars.start()
        return self._bars
