"""How the checkpoints of a run lie to each other, and what that says of the way it moved.

Weights come in blocks of columns, W [n, c] float64: n checkpoints in the order of their steps, c of
their P elements. Every number here is built from sums over columns, so blocks are added one by one
and the whole of W never stands in memory. docs/inspect.md derives the formulas.

Three numbers without a unit tell the ways of moving apart (`Signs`; None where undefined):

    net_to_path  ‖w_n − w_1‖ / Σ ‖w_{i+1} − w_i‖
    cosine       mean over i of cos(w_{i+1} − w_i, w_i − w_{i−1})
    trend        part of Σ ‖w_i − w̄‖² that a straight line in time explains
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import sqrt
from statistics import fmean, pstdev
from typing import Final

import torch
from torch import Tensor

from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.report.shared import Signs, Way, Word

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

    @property
    def verdict(self) -> Word:
        """Settled if it has all but stopped; else the nearest of line, walk and noise."""
        if len(self.times) < ENOUGH:
            return "unknown"
        trend = self.signs.trend
        if trend is None or self.slows_down:
            return "settled"
        expected = expect(self.times)
        walk, noise = expected["walk"].trend or 0.0, expected["noise"].trend or 0.0
        if trend > (1 + walk) / 2 or self.goes_straight:
            return "moving"
        if trend > (walk + noise) / 2:
            return "drifting"
        return "settled" if self.radius < SMALL * self.norm else "wandering"

    @property
    def goes_straight(self) -> bool:
        """Do steps point the same way and lead away? So does a straight path at uneven speed."""
        walk = expect(self.times)["walk"].net_to_path or 0.0
        cosine, net_to_path = self.signs.cosine or 0.0, self.signs.net_to_path or 0.0
        return cosine > 1 / 2 and net_to_path > (1 + walk) / 2

    @property
    def slows_down(self) -> bool:
        """Does the later half cover much less ground than steady motion would at these times?"""
        steady = pstdev(self.times[len(self.times) // 2 :]) / pstdev(self.times)
        return self.late_radius < STILL * steady * self.radius


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
        return Shape(
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
