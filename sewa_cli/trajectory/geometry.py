"""How the checkpoints of a run lie to each other, and what that says of the way it moved.

Weights come in blocks of columns, W [n, c] float64: n checkpoints in the order of their steps, c of
their P elements. Every number here is built from sums over columns, so blocks are added one by one
and the whole of W never stands in memory. docs/how-to/inspect.md derives the formulas.

Three numbers without a unit tell the ways of moving apart (`Signs`; None where undefined):

    net_to_path  ‖w_n − w_1‖ / Σ ‖w_{i+1} − w_i‖
    cosine       mean over i of cos(w_{i+1} − w_i, w_i − w_{i−1})
    trend        part of Σ ‖w_i − w̄‖² that a straight line in time explains
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import sqrt
from statistics import fmean, pstdev
from typing import Final

import torch
from torch import Tensor

from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.report.shared import Motion, Signs, Standing, Way, Word

ENOUGH: Final = 5  # with fewer checkpoints a line, a walk and noise look too much alike
STILL: Final = 0.2  # a later half that covers less than this part of what steady motion would
SMALL: Final = 0.001  # a radius in lengths of the mean; rounding to bfloat16 does about as much


@dataclass(frozen=True)
class Shape:
    """L2 lengths, over all P elements together."""

    times: Sequence[float]  # [n]
    to_last: list[float]  # [n] ‖w_i − w_n‖
    to_mean: list[float]  # [n] ‖w_i − w̄‖
    lengths: list[float]  # [n−1] ‖w_{i+1} − w_i‖
    cosines: list[float | None]  # [n−2] of each step with the one before; None if one is zero
    norm: float  # ‖w̄‖
    radius: float  # √(mean ‖w_i − w̄‖²)
    late_radius: float  # the same of the later half alone, around its own mean
    signs: Signs
    expected: dict[Way, Signs] | None = None  # of a line, a walk and noise; None: too few to say
    verdict: Word = "unknown"
    goes_straight: bool = False  # steps point the same way and lead away, at whatever speed
    slows_down: bool = False  # the later half covers much less ground than steady motion would


def _judge(shape: Shape) -> Shape:
    """Settled if it has all but stopped; else the nearest of line, walk and noise."""
    times, signs, expected = shape.times, shape.signs, expect(shape.times)
    line, walk, noise = signs.trend, expected["walk"], expected["noise"]
    steady = pstdev(times[len(times) // 2 :]) / pstdev(times)
    slows_down = shape.late_radius < STILL * steady * shape.radius
    leads_away = (signs.net_to_path or 0.0) > (1 + (walk.net_to_path or 0.0)) / 2
    goes_straight = (signs.cosine or 0.0) > 1 / 2 and leads_away
    of_walk, of_noise = walk.trend or 0.0, noise.trend or 0.0
    verdict: Word = "settled" if shape.radius < SMALL * shape.norm else "wandering"
    if line is None or slows_down:
        verdict = "settled"
    elif line > (1 + of_walk) / 2 or goes_straight:
        verdict = "moving"
    elif line > (of_walk + of_noise) / 2:
        verdict = "drifting"
    return replace(
        shape,
        expected=expected,
        verdict=verdict,
        goes_straight=goes_straight,
        slows_down=slows_down,
    )


class Geometry:
    """Adds up blocks of W [n, c]; `times` [n] ascend, and only their ratios matter."""

    def __init__(self, times: Sequence[float]) -> None:
        n = len(times)
        self._times = times
        t = torch.tensor(times, dtype=torch.float64)
        self._t = t - t.mean()
        self._late = n // 2  # where the later half begins
        self._to_last, self._to_mean = torch.zeros(2, n, dtype=torch.float64)
        self._steps = torch.zeros(n - 1, dtype=torch.float64)
        self._turns = torch.zeros(max(n - 2, 0), dtype=torch.float64)
        self._norm, self._late_spread, self._slope = torch.zeros(3, dtype=torch.float64)

    def add(self, W: Tensor) -> None:
        """Squares and products of one block W [n, c], float64."""
        self._to_last += (W - W[-1]).square_().sum(1)
        steps = W.diff(dim=0)
        self._turns += (steps[1:] * steps[:-1]).sum(1)
        self._steps += steps.square_().sum(1)
        late = W[self._late :]
        self._late_spread += (late - late.mean(0)).square_().sum()
        mean = W.mean(0)
        self._norm += mean.square().sum()
        centred = W - mean  # before the product with t: what is common to all would cancel badly
        self._slope += (self._t @ centred).square_().sum()
        self._to_mean += centred.square_().sum(1)

    def measure(self, ranks: Ranks = ALONE) -> Shape:
        """The shape of all blocks added so far, on all ranks."""
        sums = (self._to_last, self._to_mean, self._steps, self._turns)
        to_last_squared, to_mean_squared, steps, turns = map(ranks.sum, sums)
        late_spread, norm, slope = ranks.sum(
            torch.stack([self._late_spread, self._norm, self._slope])
        ).tolist()
        lengths = steps.sqrt().tolist()
        cosines = [
            max(-1.0, min(1.0, dot / a / b)) if a > 0 and b > 0 else None
            for dot, (a, b) in zip(turns.tolist(), pairwise(lengths), strict=True)
        ]
        to_last = to_last_squared.sqrt().tolist()
        spread, n = float(to_mean_squared.sum()), len(to_last)
        defined = [c for c in cosines if c is not None]
        shape = Shape(
            times=self._times,
            to_last=to_last,
            to_mean=to_mean_squared.sqrt().tolist(),
            lengths=lengths,
            cosines=cosines,
            norm=sqrt(norm),
            radius=sqrt(spread / n),
            late_radius=sqrt(late_spread / (n - self._late)),
            signs=Signs(
                net_to_path=min(1.0, to_last[0] / sum(lengths)) if sum(lengths) > 0 else None,
                cosine=fmean(defined) if defined else None,
                trend=min(1.0, slope / float(self._t.square().sum()) / spread)
                if spread > 0
                else None,
            ),
        )
        return shape if n < ENOUGH else _judge(shape)


def expect(times: Sequence[float]) -> dict[Way, Signs]:
    """Return the signs of three simple ways of moving at these times, in many dimensions.

    line    w_i = w_0 + v t_i
    walk    w_{i+1} = w_i + independent noise, of variance t_{i+1} − t_i
    noise   w_i = w* + independent noise, of equal variance
    """
    n, mean = len(times), fmean(times)
    waits = [after - before for before, after in pairwise(times)]
    centred = [t - mean for t in times]
    # a walk's step m moves every later checkpoint, so it meets the sum of their centred times
    tails = [-head for head in accumulate(centred)][:-1]
    explained = sum(w * tail**2 for w, tail in zip(waits, tails, strict=True))
    spread = sum(w * m * (n - m) / n for m, w in enumerate(waits, 1))
    found: dict[Way, tuple[float, float, float]] = {
        "line": (1.0, 1.0, 1.0),
        "walk": (
            sqrt(sum(waits)) / sum(map(sqrt, waits)),
            0.0,
            explained / sum(t**2 for t in centred) / spread,
        ),
        "noise": (1 / (n - 1), -0.5, 1 / (n - 1)),
    }
    names = ("net_to_path", "cosine", "trend")
    return {way: Signs(**dict(zip(names, signs, strict=True))) for way, signs in found.items()}


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor is finite as float32, like `select` looks at it."""
    wide = tensor.to(torch.float32)
    # a finite sum has finite parts; only another one asks for a look at each (50 times slower)
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())


MOST: Final = 2**20  # weights of a sample, of all checkpoints together; as float32, 4 MiB
LEAST: Final = 1024  # of each checkpoint, however many there are
BLOCK: Final = 2**17  # numbers that are measured at a time, as float64


class WeightSample:
    """Some of the weights of every checkpoint, the same of each; all, where they are few."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        drawn = max(MOST // count, LEAST)
        self._drawn: Tensor | None = None
        if drawn < size:  # by chance: a regular pattern may be one of the weights, too
            generator = torch.Generator().manual_seed(0)
            self._drawn = torch.randint(size, (drawn,), generator=generator).sort().values
        self._kept = torch.zeros(count, min(drawn, size))

    def keep(self, i: int, row: Tensor) -> None:
        columns = slice(self._size) if self._drawn is None else self._drawn.to(row.device)
        self._kept[i] = row[columns]

    def standing(
        self, used: Sequence[int], steps: Sequence[int | None], ranks: Ranks
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
        expected=shape.expected,
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
    expected = shape.expected or expect(shape.times)
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
                "it neither keeps a direction nor stays around a point"
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
