"""A chart as SVG within a page: in the page's font, small, with words for whoever points at it.

matplotlib's own SVG is a file of its own, with its own background, font and names.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Final
from xml.etree import ElementTree as ET

from markupsafe import Markup

from sewa_cli.present.charts import Chart
from sewa_cli.present.figures import figure_of, hints_of, own_style
from sewa_cli.text import shown

_SVG: Final = "{http://www.w3.org/2000/svg}"
_LINK: Final = "{http://www.w3.org/1999/xlink}href"
_HINTS: Final = "hints"
_NUMBER: Final = re.compile(r"-?\d+\.\d+")
_ROUND: Final = {"d", "x", "y", "cx", "cy", "transform"}


def inline(chart: Chart, name: str) -> Markup:
    """Return the element; `name`: of this picture on its page, for the names in it."""
    import matplotlib as mpl

    figure, text = figure_of(chart, _HINTS), io.StringIO()
    with own_style():
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})  # words stay words
        figure.set_dpi(72)
        about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=about)
    root = ET.fromstring(text.getvalue())
    for place, panel in enumerate(chart.panels):
        _add_hints(root, f"{_HINTS}{place}", [said for _, _, said in hints_of(panel)])
    used = {found for element in root.iter() for found in _references(element)}
    _tidy(root, used)
    width, height = figure.get_size_inches() * 72
    # 4 px for 3 pt: its letters are as large as the page's small ones; it may shrink by a third
    size = f"width:{width * 4 / 3:.0f}px;min-width:{width / 18:.1f}rem"
    root.attrib = {"viewBox": f"0 0 {width:g} {height:g}", "style": size, "role": "img"}
    root.set("aria-label", shown(f"{chart.title}. {chart.alt}"))
    return Markup(ET.tostring(root, encoding="unicode"))


def _add_hints(root: ET.Element, gid: str, texts: list[str]) -> None:
    """Turn the invisible points of this name into circles with a title."""
    group = root.find(f".//*[@id='{gid}']")
    if group is None:
        return
    points = list(group.iter(f"{_SVG}use"))
    group[:] = []
    group.attrib = {"class": "hints"}
    for point, text in zip(points, texts, strict=True):
        place = {"cx": point.get("x", "0"), "cy": point.get("y", "0")}
        circle = ET.SubElement(group, f"{_SVG}circle", place)
        ET.SubElement(circle, f"{_SVG}title").text = shown(text)


def _references(element: ET.Element) -> Iterator[str]:
    if link := element.get(_LINK):
        yield link.removeprefix("#")
    if clip := element.get("clip-path"):
        yield clip.removeprefix("url(#").removesuffix(")")


def _tidy(parent: ET.Element, used: set[str]) -> None:
    """Drop what a page has no use for; groups without meaning give way to their content."""
    parent.tag = parent.tag.removeprefix(_SVG)
    children: list[ET.Element] = []
    for child in parent:
        _tidy(child, used)
        if child.tag in ("metadata", "style") or (child.tag == "defs" and not len(child)):
            continue
        children += child if child.tag == "g" and not child.attrib else [child]
    parent[:] = children
    found = parent.attrib
    if found.get("id") not in used:
        found.pop("id", None)
    if link := found.pop(_LINK, None):
        found["href"] = link
    if style := found.get("style"):
        style = style.replace("; ", ";").replace(": ", ":")
        style = re.sub(r"font:([\d.]+px)[^;]*", r"font-size:\1", style)
        found["style"] = re.sub(r"font-family:[^;]*;?", "", style)
    for key in _ROUND & found.keys():
        found[key] = _NUMBER.sub(_rounded, found[key]).replace(" \n", "").replace("\n", "")
    if parent.tag not in ("text", "title"):
        parent.text = None
    parent.tail = None


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
