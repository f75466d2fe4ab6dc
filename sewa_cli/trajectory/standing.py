"""The standing of a run, in words: by all weights for `inspect`, by a sample for the others.

A sample is drawn while the checkpoints are read for something else, so it costs no read of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

import torch
from torch import Tensor

from sewa_cli.ranks import Ranks
from sewa_cli.report.shared import Motion, Standing
from sewa_cli.trajectory.geometry import ENOUGH, Geometry, Shape, expect

MOST: Final = 2**20  # weights of a sample, of all checkpoints together; as float32, 4 MiB
LEAST: Final = 1024  # of each checkpoint, however many there are
BLOCK: Final = 2**17  # numbers that are measured at a time, as float64


class WeightSample:
    """Some of the weights of every checkpoint, the same of each; all, where they are few."""

    def __init__(self, count: int, size: int) -> None:
        """Make room for `count` checkpoints with rows of `size` numbers."""
        self._size = size
        drawn = max(MOST // count, LEAST)
        self._drawn: Tensor | None = None
        if drawn < size:  # by chance: a regular pattern may be one of the weights, too
            generator = torch.Generator().manual_seed(0)
            self._drawn = torch.randint(size, (drawn,), generator=generator).sort().values
        self._kept = torch.zeros(count, min(drawn, size))

    def keep(self, i: int, row: Tensor) -> None:
        """Checkpoint i as row [P]."""
        columns = slice(self._size) if self._drawn is None else self._drawn.to(row.device)
        self._kept[i] = row[columns]

    def standing(
        self,
        used: Sequence[int],
        steps: Sequence[int | None],
        ranks: Ranks,
    ) -> Standing | None:
        """Return the standing of the whole checkpoints; None: too few to say anything.

        Columns are scaled so that lengths are about those of all weights together.
        """
        if len(used) < ENOUGH:
            return None
        geometry = Geometry(times_of(steps))
        rows, width = self._kept[list(used)], self._kept.shape[1]
        scale = sqrt(self._size / width) if width else 1.0
        columns = max(1, BLOCK // len(used))
        for start in range(0, width, columns):
            geometry.add(scale * rows[:, start : start + columns].double())
        shape = geometry.measure(ranks)
        return Standing(
            weights=sum(ranks.gather(width)),
            motion=motion_of(shape),
            verdict=shape.verdict,
            explanation=explain(shape),
        )


def times_of(steps: Sequence[int | None]) -> list[float]:
    """Steps, or places where there are none, brought to 0 … 1."""
    known = [i if step is None else step for i, step in enumerate(steps)]
    whole = (known[-1] - known[0]) or 1
    return [(step - known[0]) / whole for step in known]


def motion_of(shape: Shape) -> Motion:
    return Motion(
        checkpoints=len(shape.times),
        norm=shape.norm,
        radius=shape.radius,
        late_radius=shape.late_radius,
        net=shape.to_last[0],
        path=sum(shape.lengths),
        run=shape.signs,
        expected=expect(shape.times) if len(shape.times) >= ENOUGH else None,
    )


def explain(shape: Shape) -> str:
    """The verdict in plain words, with the numbers that it rests on."""
    if shape.verdict == "unknown":
        n = len(shape.times)
        there = f"there {'is' if n == 1 else 'are'} {n}"
        return f"no verdict: it takes {ENOUGH} finite checkpoints, and {there}"
    trend = shape.signs.trend
    if trend is None:
        return "settled: all finite checkpoints hold the same weights"
    expected = expect(shape.times)
    walk, noise = 100 * (expected["walk"].trend or 0.0), 100 * (expected["noise"].trend or 0.0)
    because = (
        f"a straight line in time explains {100 * trend:.0f} % of the spread "
        f"(steady motion: 100 %, a random walk: {walk:.0f} %, noise around a point: {noise:.0f} %)"
    )
    small = shape.radius / shape.norm if shape.norm else float("inf")
    match shape.verdict:
        case "moving":
            if shape.goes_straight:
                because = (
                    f"its steps point the same way (mean cosine {shape.signs.cosine:.2f}), and the "
                    f"net displacement is {shape.signs.net_to_path:.2f} of the path"
                )
            return (
                f"still moving in one direction: {because}; the mean of all lies behind the last, "
                "so an average of late checkpoints is usually the better one"
            )
        case "drifting":
            return (
                f"drifting, much like a random walk: {because}; "
                "it keeps no direction, and comes back to no point"
            )
        case "wandering":
            return (
                f"wandering around a point: {because}; it stays about {shape.radius:.3g} away from "
                "its mean, and averaging usually pays here"
            )
        case _ if shape.slows_down:
            return (
                f"settled: the later half spreads {shape.late_radius:.3g} around its own mean, all "
                f"together {shape.radius:.3g}; look at the later ones alone with --last"
            )
        case _:
            return (
                f"settled: it stays around a point, {100 * small:.2g} % of the weights' length "
                f"away from its mean, less than rounding to bfloat16 would move it; {because}"
            )
