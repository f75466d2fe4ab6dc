"""Turn a report into something to read, without a terminal or a file.

- `views`: a view for each kind of report: headline, verdict, facts, tables, charts
- `terminal`: its tables, for people and for programs
- `figures`: its charts, drawn by matplotlib
- `page`: everything on a page to look at and to send
- `card`: the model card of an averaged folder
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sewa_cli.errors import ConfigError
from sewa_cli.text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.present.view import View
    from sewa_cli.report.shared import ReportHead

FORMS: Final = ("table", "json", "jsonl", "csv", "markdown")


def view_of(report: ReportHead) -> View:
    from sewa_cli.present.views import VIEWS

    return VIEWS[report.kind](report)


def say(report: ReportHead) -> list[str]:
    """Return what the command was run for: sentences, each on one line."""
    return [shown(sentence) for sentence in view_of(report).says]


def details(report: ReportHead) -> list[str]:
    """Return what else there is to know; the terminal shows it with -v."""
    return [shown(sentence) for sentence in view_of(report).details]


def show(report: ReportHead, form: str = "table") -> str:
    """Return the data in one of FORMS; json is the whole report."""
    from sewa_cli.present import terminal
    from sewa_cli.report.shared import to_json

    return to_json(report) if form == "json" else terminal.show(view_of(report), form)


def summary(report: ReportHead) -> str:
    """Return what the terminal shows with -v: the tables, the details, then the main sentences."""
    said = [*details(report), *say(report)]
    return show(report) + "".join(f"{sentence}\n" for sentence in said)


def draw(report: ReportHead) -> Figure:
    from sewa_cli.present.figures import figure_of

    plot = view_of(report).plot
    if plot is None:
        raise ConfigError(f"a report of sewa {report.kind} has no picture; leave out --plot")
    return figure_of(plot)


def html(report: ReportHead) -> str:
    """Return what a notebook shows: the core of the report's page."""
    from sewa_cli.present.page import core

    return core(report)
