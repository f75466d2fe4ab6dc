"""A page to look at and to send: one file that makes no requests.

Everything that comes from a report is text: `shown` for each value, then Jinja2's autoescaping.
The page's own policy forbids all requests and all scripts.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sewa_cli import __version__
from sewa_cli.present import view_of
from sewa_cli.present.charts import MOST_POINTS, Chart
from sewa_cli.present.view import Cell, Code, Facts, Part, Rows, Section, Table
from sewa_cli.report.shared import to_json
from sewa_cli.text import number, shown

if TYPE_CHECKING:
    from sewa_cli.report.recipe import OutputFile, Recipe
    from sewa_cli.report.shared import ReportHead

_HERE: Final = Path(__file__).parent
_COMMANDS: Final = {"forecast": "select --dry-run"}
MOST_ROWS: Final = 2000  # of a table; the report has all of them
WITHOUT_PICTURES: Final = "without pictures: they need matplotlib, pip install matplotlib"


def page(report: ReportHead, name: str | None = None) -> str:
    """Return the whole page. `name`: the report's file, if it has one."""
    return _render(report, name, "s")


def core(report: ReportHead) -> str:
    """Return what a notebook shows: the page without its frame, with names of its own."""
    return _render(report, None, f"s{sha256(to_json(report).encode()).hexdigest()[:8]}-")


def has_pictures() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _render(report: ReportHead, name: str | None, prefix: str) -> str:
    view = view_of(report)
    names = iter(range(1000))
    sections = view.sections or [Section("In numbers", view.tables)]
    text = (
        _environment()
        .get_template("page.html")
        .render(
            view=view,
            sections=[*sections, again(report, name)],
            about=f"sewa {_COMMANDS.get(report.kind, report.kind)}, {when(report)}",
            report=report,
            prefix=prefix,
            is_whole=prefix == "s",
            has_pictures=has_pictures(),
            svg=lambda chart: _svg(chart, f"{prefix}p{next(names)}"),
            MOST_ROWS=MOST_ROWS,
        )
    )
    return text.lstrip()


def _svg(chart: Chart, name: str) -> Markup:
    from sewa_cli.present.page.svg import inline

    if chart.points > MOST_POINTS:
        why = f"Nothing is drawn: {chart.points:,} points are more than a picture shows."
        return Markup('<p class="note">{}</p>').format(why)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # matplotlib's, about what it leaves out
            return inline(chart, name)
    except Exception as error:  # losses of 1e300: everything else on the page is worth having
        why = f"this picture could not be drawn ({type(error).__name__})"
        return Markup('<p class="note">{}</p>').format(why)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else shown(value),
    )
    made.filters |= {"plain": _plain, "exact": _exact, "prose": _prose}
    made.globals |= {
        "style": Markup((_HERE / "page.css").read_text()),
        "policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'",
        "version": __version__,
        "without_pictures": WITHOUT_PICTURES,
    }
    return made


def _prose(sentence: str) -> Markup:
    """Return a sentence with its capital and its end, and names between back-ticks as code."""
    line = shown(sentence)
    text = str(escape(line[:1].upper() + line[1:]))
    end = "" if text.endswith((".", "?", "!", ":")) or not text else "."
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", text) + end)


def _plain(value: object, digits: int = 5) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float):
        return number(value, digits)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _exact(value: object) -> str:
    """Return a number in full, to read back; nothing for a word."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number else ""


def again(report: ReportHead, name: str | None) -> Section:
    """Return the section; `name`: of the report's file, if it has one."""
    found: Any = report
    output: str | None = getattr(found, "output", None)
    files: list[OutputFile] = (getattr(found, "files", None) or []) if output else []
    recipe: Recipe | None = getattr(found, "recipe", None)
    lines = {}
    if recipe is not None:
        apply = f"sewa apply {_word(name or 'REPORT.json')} -o again.safetensors"
        lines["the same bytes again, without the task"] = apply
        if output not in (None, "-"):
            lines["is everything as it was then?"] = f"sewa verify {_word(name or output or '')}"
    facts: dict[str, Cell] = {"made": when(report)}
    facts |= {key: getattr(found, key) for key in ("device", "seed", "task") if hasattr(found, key)}
    facts |= report.versions.model_dump()
    parts: list[Part] = [*([Code(lines)] if lines else []), Facts(facts)]
    if files:
        rows: Rows = [{"file": one.path, "bytes": one.size, "SHA-256": one.sha256} for one in files]
        parts.append(Table("What was written", rows, is_folded=len(rows) > 4))
    settings: Rows = [
        {"setting": key, "value": json.dumps(value, ensure_ascii=False)}
        for key, value in report.config.items()
        if value not in (None, [], {})
    ]
    parts.append(Table("Every setting", settings, is_folded=True))
    return Section("To do it again", parts)


def when(report: ReportHead) -> str:
    return f"{report.created.replace('T', ' ').removesuffix('+00:00')} UTC"


def _word(text: str) -> str:
    """Quote a word for a shell; it is never read as a flag."""
    word = shown(text)
    return shlex.quote(f"./{word}" if word.startswith("-") else word)
