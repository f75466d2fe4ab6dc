"""The verdict of a report: is the choice better than the baselines on held-out data?"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part


class Interval(Part):
    low: float
    high: float

    def has_zero(self) -> bool:
        return self.low <= 0 <= self.high

    def turned(self) -> Interval:
        """Return the interval of the same difference the other way round."""
        return Interval(low=0.0 - self.high, high=0.0 - self.low)


class Better(Part):
    """A baseline with a better held-out score than the choice."""

    name: str
    score: float
    difference: float | None = Field(description="the choice's score minus this; null: no number")
    interval: Interval | None = Field(None, description="95 %, paired; null: too few examples")


class Verdict(Part):
    """The choice compared with the best baseline, on the same held-out examples or parts.

    Which baseline is the best was found on the selection data, as the choice was.
    """

    kind: Literal[
        "better",
        "worse",
        "not significant",
        "too few",
        "baseline",
        "not finite",
        "baseline not finite",
        "no held-out data",
    ] = Field(
        description="better, worse, not significant: by the interval; too few: examples for one; "
        "baseline: the choice is one"
    )
    baseline: str | None = None
    difference: float | None = Field(
        None, description="held-out score of the choice minus the baseline's"
    )
    interval: Interval | None = Field(None, description="95 % of `difference`, paired")
    n: int | None = Field(None, description="units that were compared: examples, groups, parts")
    beaten_by: list[Better] = Field([], description="the best first; any is exit code 5 (--strict)")
