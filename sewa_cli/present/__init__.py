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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.report.shared import Head


def say(report: Head) -> list[str]:
    """Verdicts and what else there is to know, a sentence each."""
    from sewa_cli.present import sentences

    make: Callable[[Any], list[str]] = getattr(sentences, report.kind, lambda _: [])
    return make(report)


def show(report: Head, form: str = "table") -> str:
    """The data: table, markdown, csv, jsonl, or json, which is the whole report."""
    from sewa_cli.present import tables

    if form == "json":
        from sewa_cli.report.part import to_json

        return to_json(report)
    make: Callable[[Any], tables.Sheet] = getattr(tables, report.kind)
    return make(report).show(form)


def summary(report: Head) -> str:
    """What the terminal shows: the tables, then the sentences."""
    return show(report) + "".join(f"{sentence}\n" for sentence in say(report))


def draw(report: Head) -> Figure:
    """Needs matplotlib."""
    figure: Figure = import_module(f"sewa_cli.present.plots.{report.kind}").plot(report)
    return figure
