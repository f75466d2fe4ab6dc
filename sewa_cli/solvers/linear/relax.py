"""The linear solver: the mask problem in output space, where a checkpoint is a row of outputs.

    min over s of  L(Σ (s_i / K) y_i),   0 ≤ s ≤ 1,  Σ s = K

is convex wherever the user's loss is convex in the outputs. It is solved by accelerated projected
gradient (Beck and Teboulle 2009, with backtracking and restarts), rounded to its K largest, and
improved by swapping one chosen checkpoint for another that lowers the loss. Where there are few
subsets all of them are tried, and the answer is the best there is.

On folds of the examples it is solved side by side: one pass over the cache for all.

Nothing here reads a checkpoint or runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, inf, isfinite

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.events import Events
from sewa_cli.solvers import mask
from sewa_cli.solvers.linear.pull import Gradient
from sewa_cli.solvers.linear.surrogate import Surrogate, mean

FEW_SUBSETS = 1000  # or fewer: all are tried
MUCH_WORK = 2 * 10**8  # numbers to go through for that
TOLERANCE = 1e-6  # of the loss; an improvement by less is none
PATIENCE = 5  # iterations without one
STILL = 1e-12  # squared length of a step that leads nowhere


@dataclass(frozen=True)
class Solution:
    relaxed: Tensor  # s [k], float64
    selected: list[int]  # K of them, ascending
    history: list[float]  # predicted loss by iteration


def solve(
    surrogate: Surrogate,
    K: int,
    iterations: int = 100,
    swaps: int = 50,
    starts: Sequence[Sequence[int]] = (),
    events: Events | None = None,
) -> Solution:
    """The K checkpoints whose average has the lowest predicted loss.

    `starts`: masks to begin the swaps from as well, if they are better than the rounded one.
    """
    k = surrogate.k
    if not 0 < K < k:
        raise ValueError(f"K must lie between 1 and {k - 1}, found {K}")
    start = torch.full((k,), K / k, dtype=torch.float64)
    s, history = relax(surrogate, K, start, iterations, events)
    subsets = comb(k, K)
    if subsets <= FEW_SUBSETS and subsets * surrogate.size.numbers <= MUCH_WORK:
        # of equals, the later checkpoints
        chosen = _best(surrogate, sorted(combinations(range(k), K), key=lambda m: m[::-1])[::-1])
    else:
        masks = [mask.largest(s, K), *(sorted(start) for start in starts if len(start) == K)]
        chosen = improve(surrogate, _best(surrogate, masks), swaps)
    return Solution(s, chosen, history)


def relax_together(gradient: Gradient, K: int, starts: Tensor, evaluations: int) -> Tensor:
    """Many such problems, s [p, k] to begin from → s [p, k], by gradients alone.

    Spectral projected gradient (Birgin, Martínez and Raydan 2000): the curvature of a step is what
    the one before it has shown. It is taken if (g⁺ − g)·(s⁺ − s) ≤ curvature·|s⁺ − s|², which for a
    convex loss is enough for it to go down; else the next is shorter. A problem whose gradient is
    not finite stays where it is.
    """

    def slope_at(s: Tensor) -> Tensor:
        found = gradient(s / K) / K
        return torch.where(torch.isfinite(found).all(1, keepdim=True), found, 0.0)

    s = _project(starts, K)
    g = slope_at(s)
    steepest = (g - g.mean(1, keepdim=True)).abs().amax(1)
    curvature = torch.where(steepest > 0, 2 * steepest, 1.0)  # no element moves by more than a half
    for _ in range(evaluations):
        new = _project(s - g / curvature[:, None], K)
        moved, slope = new - s, slope_at(new)
        bend, length = ((slope - g) * moved).sum(1), (moved * moved).sum(1)
        if float(length.max()) < STILL:
            break
        seen = bend / length.clamp_min(1e-300)
        taken = seen <= curvature
        s = torch.where(taken[:, None], new, s)
        g = torch.where(taken[:, None], slope, g)
        # what bends hardly at all would be left in one leap
        curvature = torch.where(taken, torch.maximum(seen, curvature / 10), 1.5 * seen)
    return s


def _project(v: Tensor, K: int) -> Tensor:
    return torch.stack([mask.project_to_sum(one, K) for one in v])


def _best(surrogate: Surrogate, masks: Sequence[Sequence[int]]) -> list[int]:
    """The first of those with the lowest predicted loss."""
    losses = [surrogate.loss_of_mean(chosen) for chosen in masks]
    best = min(range(len(masks)), key=lambda i: losses[i] if isfinite(losses[i]) else inf)
    return list(masks[best])


def relax(
    surrogate: Surrogate,
    K: int,
    start: Tensor,
    iterations: int,
    events: Events | None = None,
) -> tuple[Tensor, list[float]]:
    """Minimise over s [k] in the feasible set; returns s and the loss by iteration."""

    def value(s: Tensor) -> float:
        return surrogate.loss(surrogate.mix(s / K))

    s = mask.project_to_sum(start, K)
    y, momentum = s, 1.0
    best = value(s)
    history = [best]
    curvature: float | None = None
    idle = 0
    for iteration in range(iterations):
        loss, gradient = surrogate.loss_and_gradient(y / K)
        gradient = gradient / K
        if not (isfinite(loss) and bool(torch.isfinite(gradient).all())):
            raise TaskError("the loss or its gradient is NaN or Inf at the predicted outputs")
        if curvature is None:  # the first step moves no element by more than a half
            curvature = 2 * float((gradient - gradient.mean()).abs().max()) or 1.0
        new, after, curvature = _step(y, loss, gradient, curvature, K, value)
        if after > best:  # overshot: begin again from here, without momentum
            y, momentum = s, 1.0
            idle += 1
        else:
            faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            y = mask.project_to_sum(new + (momentum - 1) / faster * (new - s), K)
            idle = idle + 1 if best - after <= TOLERANCE * abs(best) else 0
            s, momentum, best = new, faster, after
        history.append(best)
        if events is not None:
            events.progress("learning", iteration + 1, iterations, best)
        if idle >= PATIENCE:
            if events is not None:
                events.progress("learning", iteration + 1, iteration + 1, best)
            break
        curvature /= 1.5  # a longer step is tried first
    return s, history


def _step(
    y: Tensor,
    loss: float,
    gradient: Tensor,
    curvature: float,
    K: int,
    value: Callable[[Tensor], float],
) -> tuple[Tensor, float, float]:
    """One projected step, shorter until a parabola of that curvature bounds the loss."""
    for _ in range(40):
        new = mask.project_to_sum(y - gradient / curvature, K)
        moved = new - y
        after = value(new)
        bound = loss + float(gradient @ moved) + curvature / 2 * float(moved @ moved)
        if after <= bound + 1e-9 * abs(loss):
            break
        curvature *= 2
    return new, after, curvature


def improve(surrogate: Surrogate, chosen: Sequence[int], swaps: int) -> list[int]:
    """Swap one checkpoint for another as long as that lowers the predicted loss."""
    now = sorted(chosen)
    for _ in range(2 * len(now)):
        loss = surrogate.loss_of_mean(now)
        lower = loss - TOLERANCE * abs(loss)
        better = next((m for m, after in _swaps(surrogate, now, swaps) if after < lower), None)
        if better is None:
            break
        now = better
    return now


def _swaps(
    surrogate: Surrogate, chosen: Sequence[int], most: int
) -> Iterator[tuple[list[int], float]]:
    """Masks that differ in one place, the most promising by the gradient, with predicted losses."""
    k, K = surrogate.k, len(chosen)
    c = mean(chosen, k)
    _, gradient = surrogate.loss_and_gradient(c)
    outputs = surrogate.mix(c)
    inside = torch.tensor(chosen)
    outside = torch.tensor([i for i in range(k) if i not in set(chosen)])
    promised = gradient[outside][:, None] - gradient[inside][None, :]  # [k − K, K]
    for flat in promised.reshape(-1).argsort()[:most].tolist():
        gained, lost = int(outside[flat // K]), int(inside[flat % K])
        moved = outputs + surrogate.difference(gained, lost) / K
        yield sorted({*chosen, gained} - {lost}), surrogate.loss(moved)
