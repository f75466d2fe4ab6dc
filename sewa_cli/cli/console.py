"""Progress, warnings and sentences for people, all on stderr."""

from __future__ import annotations

import gc
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sewa_cli.cli.main import typed
from sewa_cli.cli.progress import Stages
from sewa_cli.errors import CheckpointError
from sewa_cli.events import Events, Planned
from sewa_cli.interrupts import stop_if_interrupted
from sewa_cli.mirrors import named
from sewa_cli.text import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SECONDS: Final = 30.0  # between two lines of progress, where there is no terminal for bars
BLINK: Final = 0.05  # between two looks at the bars: drawing takes longer than a small batch

# A forked process (a data loader's) must not find the lock held by a thread that it does not have
_telling = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_telling.acquire, after_in_parent=_telling.release, after_in_child=_telling.release
    )


def check_one_a_line(paths: Iterable[Path], advice: str) -> None:
    """Refuse, before any work, paths that a reader of lines would take for others."""
    for path in paths:
        if str(path).splitlines() != [str(path)]:
            raise CheckpointError(
                f"{path}: has a line break in its name; paths are printed one per line; {advice}"
            )


class ConsoleEvents(Events):
    """A bar on a terminal, else a line now and then; `quiet` leaves errors; `verbose` adds notes.

    Names in a line are escaped: it is one line and moves no cursor. rich is imported only for
    colours and bars, because that takes as long as averaging a small network's files.
    """

    def __init__(self, quiet: bool, verbose: bool) -> None:
        super().__init__()
        self._quiet = quiet
        self._verbose = verbose
        self.command = shlex.join(["sewa", *typed.arguments])
        self._bars: Progress | None = None
        self._stages = Stages(time.monotonic)
        self._last_line = self._last_drawn = time.monotonic()
        self._over = threading.Event()
        self._heart: threading.Thread | None = None
        self.one_a_line = False  # checkpoints' paths will be printed, one per line

    def __enter__(self) -> ConsoleEvents:
        if not gc.isenabled():  # `__main__` has switched it off for the imports
            gc.freeze()
            gc.enable()
        stop_if_interrupted()
        if not self._quiet and not sys.stderr.isatty():
            self._heart = threading.Thread(target=self._beat, name="progress", daemon=True)
            self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._heart is not None:
            self._heart.join()
        if self._bars is not None:
            self._bars.stop()

    def found(self, paths: Sequence[Path]) -> None:
        if self.one_a_line:
            check_one_a_line(paths, "--print0 ends them with a NUL byte, for xargs -0")

    def note(self, text: str) -> None:
        if self._verbose:
            self._console.print(shown(named(text)), style="dim")

    def say(self, *lines: str) -> None:
        for line in map(shown, map(named, lines)):
            if self._bars is not None:  # print above them
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
        with _telling:
            here = self._stages.report(stage, done, total, loss)
            if not sys.stderr.isatty():
                self._tell()
            elif here.has_ended or time.monotonic() - self._last_drawn >= BLINK:
                self._draw()

    @property
    def shows_progress(self) -> bool:  # type: ignore[override]
        return not self._quiet

    def follow(self, plan: Sequence[Planned], done: Callable[[], float]) -> None:
        with _telling:
            self._stages.follow(plan, done)

    def _tell(self) -> None:
        if time.monotonic() - self._last_line >= SECONDS:
            self._last_line = time.monotonic()
            self.say(self._stages.line())

    def _beat(self) -> None:
        """Write a line where nothing is reported for long."""
        while not self._over.wait(max(0.01, self._last_line + SECONDS - time.monotonic())):
            try:
                with _telling:
                    self._tell()
            except (OSError, ValueError):  # stderr is closed
                return

    def _draw(self) -> None:
        self._last_drawn = time.monotonic()
        bars, stages = self._bars or self._start_bars(), self._stages
        done, total = stages.whole
        bars.update(
            bars.task_ids[0],
            description=shown(stages.title),
            completed=done,
            total=total,
            figures=", ".join(stages.figures),
        )

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(
            stderr=True,
            quiet=self._quiet,
            soft_wrap=True,
            highlight=False,
            # `[x]` in a name is no style, `:x:` no picture
            markup=False,
            emoji=False,
        )

    def _start_bars(self) -> Progress:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bars.add_task("", figures="")
        self._bars.start()
        return self._bars
