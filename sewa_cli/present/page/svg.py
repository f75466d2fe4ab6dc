"""A figure as SVG within a page: in the page's font and colours, small, with titles to hover over.

matplotlib's own SVG is a file of its own: it has its own background, font and names. Here its
colours become variables, so that a dark page turns them; its numbers are rounded, its groups
without meaning dissolved, its paths that look alike joined.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from colorsys import hls_to_rgb, rgb_to_hls
from itertools import groupby, pairwise
from math import inf
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from markupsafe import Markup

from sewa_cli.present.plots import hints, house
from sewa_cli.text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_HINTS: Final = 3000  # of a picture: each is some hundred bytes
_SVG: Final = "{http://www.w3.org/2000/svg}"
_LINK: Final = "{http://www.w3.org/1999/xlink}href"
_COLOUR: Final = re.compile(r"#([0-9a-f]{6})\b")
_NUMBER: Final = re.compile(r"-?\d+\.\d+")
_INK, _PAPER = (232, 230, 225), (22, 24, 28)  # of a dark page
_ROUND: Final = {"d", "x", "y", "width", "height", "transform", "points"}


def inline(figure: Figure, name: str, alt: str) -> Markup:
    """`name`: of this picture on its page, before all names in it."""
    text = io.StringIO()
    with house():
        import matplotlib as mpl

        mpl.rcParams["svg.fonttype"] = "none"  # words stay words
        figure.set_dpi(72)
        about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=about)
    root = ET.fromstring(text.getvalue())
    used = {found for e in root.iter() for found in _references(e)}
    _tidy(root, name, used)
    width, height = figure.get_size_inches() * 72
    overlay = ET.SubElement(root, "g", {"class": "hints"})
    for axes in figure.axes:
        overlay.extend(_hints(axes, height))
    # 4 px for 3 pt: its letters are as large as the page's small ones; it may shrink by a third
    size = f"width:{width * 4 / 3:.0f}px;min-width:{width / 18:.1f}rem"
    root.attrib = {"viewBox": f"0 0 {width:g} {height:g}", "style": size}
    root.attrib |= {"role": "img", "aria-label": shown(alt)}
    return Markup(ET.tostring(root, encoding="unicode"))


def colours(svg: str) -> Iterator[tuple[str, str, str]]:
    """The variables of pictures: name, colour on white, colour on dark."""
    for hexadecimal in sorted(set(re.findall(r"var\(--c([0-9a-f]{6})\)", svg))):
        yield f"--c{hexadecimal}", f"#{hexadecimal}", _on_dark(hexadecimal)


def _on_dark(hexadecimal: str) -> str:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (0, 2, 4))
    if red == green == blue:  # a grey is as far from the paper as it was
        mixed = [p + (i - p) * (255 - red) / 255 for i, p in zip(_INK, _PAPER, strict=True)]
    else:
        hue, light, strong = rgb_to_hls(red / 255, green / 255, blue / 255)
        mixed = [255 * part for part in hls_to_rgb(hue, max(light, 0.62), strong)]
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def _references(element: ET.Element) -> Iterator[str]:
    if link := element.get(_LINK):
        yield link.removeprefix("#")
    if clip := element.get("clip-path"):
        yield clip.removeprefix("url(#").removesuffix(")")


def _tidy(parent: ET.Element, name: str, used: set[str]) -> None:
    children: list[ET.Element] = []
    for child in list(parent):
        child.tag = child.tag.removeprefix(_SVG)
        if child.tag in ("metadata", "style") or (child.tag == "defs" and not len(child)):
            continue
        _tidy(child, name, used)
        _rename(child, name, used)
        if child.tag == "g" and not child.attrib:
            children += child
        elif child.tag != "defs" or len(child):
            children.append(child)
    parent[:] = []
    for look, alike in groupby(children, _look):
        first, *others = alike
        parent.append(first)
        if look:  # drawn in one go
            first.set("d", "".join(one.get("d", "") for one in (first, *others)))
        else:
            parent.extend(others)
    if parent.tag != "text":
        parent.text = None
    parent.tail = None
    parent.tag = parent.tag.removeprefix(_SVG)


def _look(element: ET.Element) -> str:
    """The same for paths that can be joined; nothing for what cannot."""
    if element.tag != "path" or "id" in element.attrib:
        return ""
    return str([(key, value) for key, value in element.attrib.items() if key != "d"])


def _rename(element: ET.Element, name: str, used: set[str]) -> None:
    found = element.attrib
    if (own := found.pop("id", None)) in used:
        found["id"] = f"{name}-{own}"
    if link := found.pop(_LINK, None):
        found["href"] = f"#{name}-{link.removeprefix('#')}"
    if clip := found.get("clip-path"):
        found["clip-path"] = clip.replace("url(#", f"url(#{name}-")
    if style := found.get("style"):
        style = style.replace("; ", ";").replace(": ", ":")
        style = re.sub(r"font:([\d.]+px)[^;]*", r"font-size:\1", style)
        style = re.sub(r"font-family:[^;]*;?", "", style)
        found["style"] = _COLOUR.sub(r"var(--c\1)", style)
    if found.get("transform", "").startswith("rotate(-0 "):
        del found["transform"]
    for key in _ROUND & found.keys():
        found[key] = _NUMBER.sub(_rounded, found[key]).replace(" \n", "").replace("\n", "")


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _hints(axes: Axes, height: float) -> Iterator[ET.Element]:
    found = hints(axes)[:MOST_HINTS]
    box = axes.get_window_extent()
    middle = axes.viewLim.y0 + axes.viewLim.height / 2
    at = [
        axes.transData.transform((hint.x, middle if hint.y is None else hint.y)) for hint in found
    ]
    strips = sorted(float(x) for hint, (x, _) in zip(found, at, strict=True) if hint.y is None)
    gaps = [b - a for a, b in pairwise(strips) if b > a]
    wide = min(12.0, max(1.0, min(gaps, default=12.0)))
    latest = -inf
    for hint, (x, y) in zip(found, at, strict=True):
        if hint.y is None:
            if abs(x - latest) < 0.99:  # nobody could point at either
                continue
            latest = x
            place = {"x": x - wide / 2, "y": height - box.y1, "width": wide, "height": box.height}
            shape = ET.Element("rect", {key: f"{value:.1f}" for key, value in place.items()})
        else:
            shape = ET.Element("circle", {"cx": f"{x:.1f}", "cy": f"{height - y:.1f}", "r": "5"})
        ET.SubElement(shape, "title").text = shown(hint.text)
        yield shape
