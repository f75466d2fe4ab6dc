"""Values as people read them: sizes, numbers, lists of names, one line of an error."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite


def size(number: float) -> str:
    """1.5 GiB."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def number(value: float | None, digits: int = 5) -> str:
    """Five digits are enough to compare losses; – stands for what is not finite, or not there."""
    if value is None or not isfinite(value):
        return "–"
    return f"{value:.{digits}g}" if abs(value) < 1e6 else f"{value:.{digits - 1}e}"


def few(names: Sequence[str], most: int = 3) -> str:
    """a, b, c and 4 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_K(name: str, K: int | None) -> str:
    """An average's name, with its budget where it has one: `lawa K=10`."""
    return name if K is None else f"{name} K={K}"


def one_line(text: object, most: int | None = None) -> str:
    """Of an error or any other text; cut after `most` characters."""
    return " ".join(str(text).split())[:most]


def finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not finite is null."""
    return value if value is not None and isfinite(value) else None
