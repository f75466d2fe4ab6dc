"""A page to look at and to send: one file that asks nobody for anything.

parts    what a page is made of
kinds    a chapter for each kind of report
svg      pictures

Everything that comes from a report is text: `shown` for each value, then Jinja2's autoescaping.
The page's own policy forbids all requests, and all scripts but its own few lines.
"""

from __future__ import annotations

import re
import warnings
from base64 import b64encode
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sewa_cli import __version__
from sewa_cli.present.page.kinds import chapter
from sewa_cli.present.sheet import Ordered
from sewa_cli.report.part import to_json
from sewa_cli.text import number, shown

if TYPE_CHECKING:
    from sewa_cli.present.plots import Picture
    from sewa_cli.report.shared import Head

_HERE: Final = Path(__file__).parent
WITHOUT_PICTURES: Final = "without pictures: they need matplotlib, pip install matplotlib"


def page(report: Head, name: str | None = None) -> str:
    """Return the whole page. `name`: the report's file, if it has one."""
    return _render("page.html", found=chapter(report, name), drawn=_Drawn())


def core(report: Head) -> str:
    """For a notebook: the answer, its pictures and tables, under names of their own."""
    name = f"p{sha256(to_json(report).encode()).hexdigest()[:8]}-"  # other cells have theirs
    return _render("core.html", found=chapter(report), drawn=_Drawn(name))


def has_pictures() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


class _Drawn:
    """Pictures as they are asked for, and then the colours that they need."""

    def __init__(self, name: str = "p") -> None:
        self.name = name  # before all others
        self.is_possible = has_pictures()
        self._names = count(1)
        self._all: list[str] = []

    def svg(self, picture: Picture) -> Markup:
        from sewa_cli.present.page.svg import inline

        alt = f"{picture.title}. {picture.alt}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # matplotlib's, of what it leaves out
                found = inline(picture.draw(), f"{self.name}{next(self._names)}", alt)
        except Exception as error:  # losses of 1e300: all else on the page is worth having
            why = f"this picture could not be drawn ({type(error).__name__})"
            return Markup('<p class="note">{}</p>').format(why)
        self._all.append(found)
        return found

    def colours(self) -> list[tuple[str, str, str]]:
        if not self._all:
            return []
        from sewa_cli.present.page.svg import colours

        return list(colours("".join(self._all)))


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
    made.filters |= {"plain": _plain, "exact": _exact, "prose": _prose, "sort_key": _sort_key}
    style, script = ((_HERE / name).read_text() for name in ("page.css", "sort.js"))
    hashed = b64encode(sha256(script.encode()).digest()).decode()
    made.globals |= {
        "style": Markup(style),
        "script": Markup(script),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'; "
        "base-uri 'none'; form-action 'none'",
        "version": __version__,
        "without_pictures": WITHOUT_PICTURES,
    }
    return made


def _render(template: str, **known: Any) -> str:
    return _environment().get_template(template).render(**known)


def _prose(sentence: str) -> Markup:
    """With names that stand between back-ticks as code, and an end."""
    text = str(escape(shown(sentence)))
    end = "" if text.endswith((".", "?", "!", ":")) or not text else "."
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", text) + end)


def _plain(value: object, digits: int = 5) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float):
        return number(value, digits)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _sort_key(value: object) -> str:
    return repr(value.key) if isinstance(value, Ordered) else ""


def _exact(value: object) -> str:
    """To sort by, and to read back; nothing for what is no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number else ""
