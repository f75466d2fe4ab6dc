"""From a report to something to read. Knows reports and nothing else: no terminal, no file.

So the command line, a notebook, a model card and a page say the same words. Each of these takes any
report, and leaves the work to the function or module that is named like the report's kind:

sentences   what it says, one line each
tables      what it holds: in rows for programs, in tables for people
plots       a figure, or several
page        all of it on a page to look at and to send
tracked     numbers, curves and names for trackers
card        the model card of an averaged folder
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.errors import ConfigError
from sewa_cli.text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.present.plots import Picture
    from sewa_cli.report.shared import Head


# form → the module here whose `show(report, form)` makes it
FORMS: Final = dict.fromkeys(("table", "json", "jsonl", "csv", "markdown"), "tables")


def kind_of(report: Head) -> str:
    """Whose functions are asked: a choice by a metric reads unlike one by the loss."""
    return "contest" if getattr(report, "contest", None) is not None else report.kind


def say(report: Head) -> list[str]:
    """Return what the command was run for, a sentence each, on one line whatever it names."""
    return _sentences(kind_of(report), report)


def details(report: Head) -> list[str]:
    """Return what else there is to know, in the same way; the terminal shows it with -v."""
    return _sentences(f"{kind_of(report)}_details", report)


def _sentences(name: str, report: Head) -> list[str]:
    from sewa_cli.present import sentences

    make: Callable[[Any], list[str]] = getattr(sentences, name, lambda _: [])
    return [shown(sentence) for sentence in make(report)]


def show(report: Head, form: str = "table") -> str:
    """The data in one of FORMS; json is the whole report."""
    text: str = import_module(f"sewa_cli.present.{FORMS[form]}").show(report, form)
    return text


def summary(report: Head) -> str:
    """Return what the terminal shows with -v: the tables, the details, then the main sentences."""
    said = [*details(report), *say(report)]
    return show(report) + "".join(f"{sentence}\n" for sentence in said)


def draw(report: Head) -> Figure:
    """Return the figure of a report; needs matplotlib. A ConfigError if it has none."""
    plots = _plots(report)
    if plots is None:
        raise ConfigError(f"a report of sewa {report.kind} has no picture")
    figure: Figure = plots.plot(report)
    return figure


def pictures(report: Head) -> Iterator[tuple[str, Picture]]:
    """All there is to draw of it, with the part of a page that each belongs to."""
    if (plots := _plots(report)) is not None:
        yield from plots.pictures(report)


def _plots(report: Head) -> ModuleType | None:
    name = f"sewa_cli.present.plots.{kind_of(report)}"
    return import_module(name) if find_spec(name) else None


def html(report: Head) -> str:
    """What a notebook shows: the core of the report's page."""
    from sewa_cli.present.page import core

    return core(report)
