"""What of stderr needs rich: colours, tables, progress bars. Imported when the first is shown."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def make_console(quiet: bool) -> Console:
    return Console(
        stderr=True,
        quiet=quiet,
        soft_wrap=True,
        highlight=False,
        # paths and names are shown as they are: `[x]` is no style, `:x:` no picture
        markup=False,
        emoji=False,
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
