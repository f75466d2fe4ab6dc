"""Numbers in words: changes, differences, intervals."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

from sewa_cli.text import number

if TYPE_CHECKING:
    from sewa_cli.report.shared import Cost, Interval, Lora, Standing


def upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def than_last(value: float | None, last: float | None) -> str:
    """Say in words how far a score is from the last checkpoint's."""
    if value is None or last is None or not isfinite(value) or not isfinite(last):
        return ""
    if value == last:
        return ", as the last checkpoint's"
    if last <= 0:
        return f"; the last checkpoint's is {number(last, 3)}"
    return f", {change(value, last)} {'below' if value < last else 'above'} the last checkpoint's"


def and_last(value: float | None, last: float | None) -> str:
    """Show a score of the last checkpoint next to another, and the change."""
    if last is None:
        return ""
    by = ""
    if value is not None and isfinite(value) and 0 < last < inf and value != last:
        by = f", {'−' if value < last else '+'}{change(value, last)}"
    return f" (last checkpoint {number(last, 3)}{by})"


def change(value: float, last: float) -> str:
    """Return how far a value is from another one in per cent, without a sign."""
    by = 100 * abs(value - last) / last
    return f"{by:.0f} %" if by >= 10 else f"{by:.2g} %"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def difference(by: float, interval: Interval | None) -> str:
    """Say how far a score is from another one, and whether that is significant."""
    said = signed(by, plus=True)
    if interval is None:
        return said
    significant = "not significant" if interval.has_zero() else "significant"
    return f"{said}, {ci(interval)}, {significant}"


def gained(by: float, interval: Interval | None) -> str:
    """Say the same of `by` less: a loss that is lower by so much."""
    return difference(0.0 - by, interval and interval.turned())


def ci(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"95 % CI [{signed(interval.low)}, {signed(interval.high)}]"


def signed(value: float, *, plus: bool = False) -> str:
    """Return three digits of a number, with a minus sign that is as wide as a plus."""
    sign = "−" if value < 0 else "+" if plus and value > 0 else ""
    return f"{sign}{number(abs(value), 3)}"


def wrote(output: str | None) -> list[str]:
    return [] if output in (None, "-") else [f"wrote {output}"]


def recalled(cost: Cost) -> list[str]:
    """Say how many results of an earlier run were used."""
    return [f"{cost.recalled:,} results recalled from --cache"] if cost.recalled else []


def describe_lora(lora: Lora) -> str:
    apart = f"{lora.largest:.2%} at most, {lora.mean:.2%} on average, over {lora.pairs} pairs"
    if lora.mode == "merged":
        return f"products B·A averaged and re-factored to the same rank; error {apart}"
    return f"A and B averaged apart; the product is off the mean of products by {apart}"


def standing(found: Standing | None) -> list[str]:
    """Say how the run's weights move."""
    if found is None:
        return []
    return [f"the run is {found.explanation}"]
