"""How the weights of a run moved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part

Word = Literal["moving", "drifting", "wandering", "settled", "unknown"]
Way = Literal["line", "walk", "noise"]


class Signs(Part):
    """Three numbers without a unit that tell the ways of moving apart; null where undefined."""

    net_to_path: float | None = Field(description="net displacement by the length of the path")
    cosine: float | None = Field(description="mean, of successive steps")
    trend: float | None = Field(description="part of the spread that a line in time explains")


class Motion(Part):
    """Lengths over all floating-point elements of the finite checkpoints."""

    checkpoints: int
    norm: float = Field(description="of the mean")
    radius: float = Field(description="root mean square distance from the mean")
    late_radius: float = Field(description="the same of the later half, from its own mean")
    net: float = Field(description="distance from the first to the last")
    path: float = Field(description="sum of the steps' lengths")
    run: Signs
    expected: dict[Way, Signs] | None = Field(description="line, walk, noise; null if too few")


class Standing(Part):
    """The verdict of `inspect`, by weights drawn while the checkpoints were read."""

    weights: int = Field(description="the number of each checkpoint's weights that were used")
    motion: Motion
    verdict: Word
    explanation: str
