"""The ladder of moving averages, and the quarters of the run: in one pass over the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from torch import Tensor

from sewa_cli.methods.family import Name, ladder
from sewa_cli.objective.intervals import FEWEST
from sewa_cli.report.shared import Interval
from sewa_cli.report.standing import Fall
from sewa_cli.solvers import Problem
from sewa_cli.solvers.linear.survey import QUARTERS

FEWEST_RUNGS = 3  # the newest, the mean of all, and one between


def climb(
    problem: Problem, names: list[Name], with_parts: bool
) -> tuple[dict[Name, Tensor], dict[Name, list[int]]]:
    """Moving averages [P] and means of the run's quarters, grown row by row.

    m ← d·m + (1 − d)·w with d = (K − 1)/(K + 1), from the first one on; the mean of all by 1/i.
    Which checkpoints are whole is known in the end; so are the quarters' members.
    """
    flats: dict[Name, Tensor] = {}
    parts: dict[Name, list[int]] = {}
    at_most = problem.trajectory.k
    for i, row in problem.trajectory.rows():
        part = (f"quarter {i * QUARTERS // at_most + 1} of the run", None)
        if with_parts:
            parts.setdefault(part, []).append(i)
            flats[part] = (
                flats[part].lerp_(row, 1 / len(parts[part])) if part in flats else row.clone()
            )
        for name, K in names:
            if i == 0:
                flats[name, K] = row.clone()
                continue
            new = 2 / (K + 1) if K is not None else 1.0 if name == "last" else 1 / (i + 1)
            flats[name, K].lerp_(row, new)
    return flats, parts


def rungs(k: int, most: int) -> list[Name]:
    """The ladder, or as many of its rungs as there is room for; both ends are among them."""
    every = ladder(k)
    if len(every) <= most:
        return every
    return [every[round(i * (len(every) - 1) / (most - 1))] for i in range(most)]


def fall(
    parts: Mapping[Name, Sequence[int]], losses: Mapping[Name, Tensor], weights: Tensor
) -> Fall | None:
    """How far the loss [units] of the last quarter's mean is below an earlier one's.

    Of the latest with as many checkpoints: a mean of fewer is worse, whether the run moves or not.
    None: no quarter has as many, or the loss is not finite.
    """
    *earlier, last = parts.values() if len(parts) == QUARTERS else [()]
    alike = [since for since, some in enumerate(earlier, 1) if len(some) == len(last)]
    if not alike:
        return None
    found = list(losses.values())
    by = found[alike[-1] - 1] - found[-1]
    share = weights / weights.sum()
    mean, loss = float(by @ share), float(found[-1] @ share)
    if not (isfinite(mean) and isfinite(loss)):
        return None
    half = 1.96 * float(((by - mean) ** 2 @ share / max(len(share) - 1, 1)).sqrt())
    interval = Interval(low=mean - half, high=mean + half) if len(share) >= FEWEST else None
    return Fall(since=alike[-1], loss=loss, by=mean, interval=interval)
