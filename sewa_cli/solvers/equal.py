"""Checkpoints that do not differ: every average of them is the same, and nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sewa_cli.methods import Run, parse_one
from sewa_cli.methods.family import Name
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Choice, Problem
from sewa_cli.text import with_K

EQUAL = "the checkpoints do not differ on the selection data"
ROUNDING = 1e-6  # of the loss: equal weights are summed up by other factors in each average


def are_equal(losses: Tensor, within: float = ROUNDING) -> bool:
    """Losses [averages, …], but for so much of them."""
    apart = (losses - losses[0]).abs().max()
    return bool(apart < within * losses.abs().max().clamp_min(1e-300))  # of NaN and Inf, False


def any_of(problem: Problem, losses: Mapping[Name, float], K: int) -> Choice | None:
    """The mean of all or the K newest, where it is all the same; None: the checkpoints differ.

    `losses`: of simple averages. A coarse loss may have them equal on a run that moves, so the
    weights decide; they are looked at only then, as they may have to be read for it.
    """
    if not are_equal(torch.tensor(list(losses.values()), dtype=torch.float64)):
        return None
    first: Tensor | None = None
    same = True
    for _, row in problem.trajectory.rows():  # to the end: other ranks have other columns
        first = row.clone() if first is None else first
        same = same and torch.equal(row, first)
    if not all(problem.trajectory.ranks.gather(same)):
        return None
    name: Name = ("uniform", None) if K == AUTO else ("latest", K)
    problem.events.warn(taken(EQUAL, name))
    c = parse_one(name[0])(Run(problem.trajectory.k), K)[0]
    return Choice(c, with_K(*name), equal=True)


def taken(reason: str, name: Name) -> str:
    return f"{reason}; `{with_K(*name)}` is taken, which learns nothing"
