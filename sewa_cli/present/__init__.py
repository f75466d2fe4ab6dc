"""From a report to something to read. Knows reports and nothing else: no terminal, no file.

So the command line, a notebook, a model card and a page say the same words. Each of these takes any
report, and leaves the work to the function or module that is named like the report's kind:

sentences   what it says, one line each
tables      what it holds: in rows for programs, in tables for people
plots       a figure, or several
page        all of it on a page to look at and to send
card        the model card of an averaged folder
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

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
    """Verdicts and what else there is to know, a sentence each, on one line whatever it names."""
    from sewa_cli.present import sentences

    make: Callable[[Any], list[str]] = getattr(sentences, kind_of(report), lambda _: [])
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
    figure: Figure = import_module(f"sewa_cli.present.plots.{kind_of(report)}").plot(report)
    return figure


def pictures(report: Head) -> Iterator[tuple[str, Picture]]:
    """All there is to draw of it, with the part of a page that each belongs to."""
    from importlib.util import find_spec

    name = f"sewa_cli.present.plots.{kind_of(report)}"
    if find_spec(name):
        yield from import_module(name).pictures(report)


def html(report: Head) -> str:
    """What a notebook shows: the core of the report's page."""
    from sewa_cli.present.page import core

    return core(report)


def numbers(report: Head) -> dict[str, float]:
    """For trackers: every finite number of the report's table, `uniform/heldout_loss`."""
    from sewa_cli.present import tables
    from sewa_cli.text import with_K

    make = getattr(tables, kind_of(report), None)
    found = {}
    for place, row in enumerate(make(report).rows if make else ()):
        words = [str(value) for value in row.values() if isinstance(value, str)]
        K = row.get("K")
        name = with_K(words[0] if words else str(place), K if isinstance(K, int) else None)
        if "window" in row:
            name = f"window {row['window']}/{name}"
        for column, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
                found[f"{name}/{column}"] = float(value)
    return found


def curves(report: Any) -> dict[str, list[tuple[int, float]]]:
    """For trackers: what has a place along something, the history by iteration, weights by step."""
    found: dict[str, list[tuple[int, float]]] = {
        "history": [
            (at, loss)
            for at, loss in enumerate(getattr(report, "history", []), 1)
            if loss is not None
        ]
    }
    for one in getattr(report, "candidates", []):
        if one.weight is not None:
            at = one.index if one.step is None else one.step
            found.setdefault("weight", []).append((at, one.weight))
    return {name: points for name, points in found.items() if points}
