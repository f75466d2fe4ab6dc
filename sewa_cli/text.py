"""Values as people read them: sizes, numbers, names, one line of an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf, isfinite

JOINERS = "\u200c\u200d"  # invisible, but without them Persian, Hindi and emoji are misspelt


def size(number: float) -> str:
    """1.5 GiB."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """0.4 s, 45 s, 12 min, 3.2 h, 4.1 days."""
    for unit, length, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        value = seconds / length
        if value < most:
            exact = 1 if value < 10 and (unit == "h" or value < 1) else 0
            return f"{value:.{exact}f} {unit}"
    return f"{seconds / 86400:.1f} days"


def number(value: float | None, digits: int = 5) -> str:
    """Return the number with five digits; – for None and for non-finite ones."""
    if value is None or not isfinite(value):
        return "–"
    if 10**digits <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.{digits}g}" if abs(value) < 1e6 else f"{value:.{digits - 1}e}"


def examples(count: int, groups: int | None, alone: str = "") -> str:
    """1,200 examples in 40 groups; without groups, the number alone."""
    return f"{count:,}{alone}" if groups is None else f"{count:,} examples in {groups:,} groups"


def or_inf(value: float) -> float:
    """Sort non-finite values last."""
    return value if isfinite(value) else inf


def few(names: Sequence[str], most: int = 3) -> str:
    """a, b, c and 4 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(name: str, known: Iterable[str], hint: str = "") -> str:
    """Return `did you mean lawa?`, if a name is close, and then a hint."""
    from difflib import get_close_matches  # is slow to import

    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? {hint}".rstrip() if near else hint


def with_K(name: str, K: int | None) -> str:
    """Return an average's name, with its K where it has one: `lawa K=10`."""
    return name if K is None else f"{name} K={K}"


def shown(text: object, most: int | None = None) -> str:
    """Return the text on one line with control characters escaped: `a\\x1b[2Jb`, `a\\nb`.

    Names come from files and may move the cursor, forge a line or turn the reading direction. A
    backslash stays one, because paths have them. A text longer than `most` loses its middle.
    """
    line = str(text)
    if not line.isprintable():
        line = "".join(map(_escaped, line))
    if most is not None and len(line) > most:
        half = (most - 3) // 2
        line = f"{line[:half]} … {line[-half:]}"
    return line


def shown_lines(text: str) -> str:
    """Return `shown` of each line."""
    return "\n".join(map(shown, text.split("\n")))


def markdown(text: object) -> str:
    """Return `shown` with what would end a cell or be HTML, a link or a picture escaped."""
    return re.sub(r"[\\|<]|(?<=])\(", r"\\\g<0>", shown(text))


def code(name: object) -> str:
    """Return a name in Markdown, as code where nothing in it needs escaping."""
    text = shown(name)
    if set(text).isdisjoint("\\`|"):
        return f"`{text}`"
    return markdown(text).replace("`", r"\`")


def _escaped(character: str) -> str:
    if character.isprintable() or character in JOINERS:
        return character
    from unicodedata import category

    # control, format, half of a pair; ends of a line and of a paragraph. The other unprintable
    # characters are spaces, private, or newer than our Unicode: they do no harm
    if category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character


def one_line(text: object, most: int | None = None) -> str:
    """Return the text with single spaces for all white space, cut after `most` characters."""
    return " ".join(str(text).split())[:most]


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if value is not None and isfinite(value) else None


def is_utf8(name: str) -> bool:
    """Tell whether a report and a safetensors file can hold the name."""
    return name == name.encode(errors="replace").decode()
