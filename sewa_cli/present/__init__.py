"""From a report to something to read. Knows reports and nothing else: no terminal, no file.

So the command line, a notebook, a model card and a page say the same words. Each of these takes any
report, and leaves the work to the function or module that is named like the report's kind:

sentences   what it says, one line each
tables      what it holds: in rows for programs, in tables for people
plots       a figure
card        the model card of an averaged folder
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.report.shared import Head


# form → the module here whose `show(report, form)` makes it
FORMS: Final = dict.fromkeys(("table", "json", "jsonl", "csv", "markdown"), "tables")


def say(report: Head) -> list[str]:
    """Verdicts and what else there is to know, a sentence each, on one line whatever it names."""
    from sewa_cli.present import sentences

    make: Callable[[Any], list[str]] = getattr(sentences, report.kind, lambda _: [])
    return [shown(sentence) for sentence in make(report)]


def show(report: Head, form: str = "table") -> str:
    """The data in one of FORMS; json is the whole report."""
    text: str = import_module(f"sewa_cli.present.{FORMS[form]}").show(report, form)
    return text


def summary(report: Head) -> str:
    """What the terminal shows: the tables, then the sentences."""
    return show(report) + "".join(f"{sentence}\n" for sentence in say(report))


def draw(report: Head) -> Figure:
    """Needs matplotlib."""
    figure: Figure = import_module(f"sewa_cli.present.plots.{report.kind}").plot(report)
    return figure
