"""What of stderr needs rich: colours, tables, progress bars. Imported when the first is shown."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sewa_cli.cli.door import hush


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads what we say any more; the work goes on in silence."""
        self.quiet = True
        hush()


def make_console(quiet: bool) -> Console:
    return _Console(
        stderr=True,
        quiet=quiet,
        soft_wrap=True,
        highlight=False,
        width=None if sys.stderr.isatty() else 240,  # a file has no edge to cut a table at
    )


def make_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
