"""The linear solver: the mask problem in output space, where a checkpoint is a row of outputs.

    min over s of  L(Σ (s_i / K) y_i),   0 ≤ s ≤ 1,  Σ s = K

is convex wherever the user's loss is convex in the outputs. It is solved by accelerated projected
gradient (Beck and Teboulle 2009, with backtracking and restarts), rounded to its K largest, and
improved by swapping one chosen checkpoint for another that lowers the loss. Where there are few
subsets all of them are tried, and the answer is the best there is.

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
from sewa_cli.solvers import mask
from sewa_cli.solvers.linear.surrogate import Sample, Surrogate

FEW_SUBSETS = 1000  # or fewer: all are tried
MUCH_WORK = 2 * 10**8  # numbers to go through for that
TOLERANCE = 1e-6  # of the loss; an improvement by less is none
PATIENCE = 5  # iterations without one


@dataclass(frozen=True)
class Solution:
    probabilities: list[float]  # s, one for each checkpoint
    selected: list[int]  # K of them, ascending
    history: list[float]  # predicted loss by iteration


@dataclass(frozen=True)
class Swap:
    """A mask that differs in one place, and its predicted loss."""

    chosen: list[int]
    gained: int
    lost: int
    loss: float


def solve(
    surrogate: Surrogate,
    K: int,
    iterations: int = 100,
    tries: int = 50,
    starts: Sequence[Sequence[int]] = (),
    sample: Sample | None = None,
    relaxed: Tensor | None = None,
    on_iteration: Callable[[int, float], None] | None = None,
    try_all: bool = True,
) -> Solution:
    """The K checkpoints whose average has the lowest predicted loss on the sample (None: on all).

    `starts`: masks to begin the swaps from as well, if they are better than the rounded one.
    `relaxed`: s [k] to begin from. `try_all`: all subsets, if they are few.
    """
    k = surrogate.k
    if not 0 < K < k:
        raise ValueError(f"K must lie between 1 and {k - 1}, found {K}")
    start = torch.full((k,), K / k, dtype=torch.float64) if relaxed is None else relaxed
    s, history = relax(surrogate, K, start, iterations, sample, on_iteration)
    subsets = comb(k, K)
    if try_all and subsets <= FEW_SUBSETS and subsets * surrogate.size.numbers <= MUCH_WORK:
        chosen = _best_of_all(surrogate, K, sample)
    else:
        masks = [mask.largest(s, K), *(sorted(start) for start in starts if len(start) == K)]
        losses = [surrogate.loss(surrogate.mix(mean(m, k)), sample) for m in masks]
        best = min(range(len(masks)), key=lambda i: losses[i] if isfinite(losses[i]) else inf)
        chosen = improve(surrogate, masks[best], tries, sample)
    return Solution(probabilities=s.tolist(), selected=chosen, history=history)


def relax(
    surrogate: Surrogate,
    K: int,
    start: Tensor,
    iterations: int,
    sample: Sample | None = None,
    on_iteration: Callable[[int, float], None] | None = None,
) -> tuple[Tensor, list[float]]:
    """Minimise over s [k] in the feasible set; returns s and the loss by iteration."""

    def value(s: Tensor) -> float:
        return surrogate.loss(surrogate.mix(s / K), sample)

    s = mask.project_to_sum(start, K)
    y, momentum = s, 1.0
    best = value(s)
    history = [best]
    curvature: float | None = None
    idle = 0
    for iteration in range(iterations):
        loss, gradient = surrogate.loss_and_gradient(y / K, sample)
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
        if on_iteration is not None:
            on_iteration(iteration, best)
        if idle >= PATIENCE:
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


def improve(
    surrogate: Surrogate, chosen: Sequence[int], tries: int, sample: Sample | None = None
) -> list[int]:
    """Swap one checkpoint for another as long as that lowers the predicted loss."""
    now = sorted(chosen)
    for _ in range(2 * len(now)):
        loss = surrogate.loss(surrogate.mix(mean(now, surrogate.k)), sample)
        better = (
            swap
            for swap in swaps(surrogate, now, tries, sample)
            if swap.loss < loss - TOLERANCE * abs(loss)
        )
        swap = next(better, None)
        if swap is None:
            break
        now = swap.chosen
    return now


def swaps(
    surrogate: Surrogate, chosen: Sequence[int], tries: int, sample: Sample | None = None
) -> Iterator[Swap]:
    """The most promising swaps by the gradient, each with its predicted loss."""
    k, K = surrogate.k, len(chosen)
    c = mean(chosen, k)
    _, gradient = surrogate.loss_and_gradient(c, sample)
    outputs = surrogate.mix(c)
    inside = torch.tensor(sorted(chosen))
    outside = torch.tensor([i for i in range(k) if i not in set(chosen)])
    promised = gradient[outside][:, None] - gradient[inside][None, :]  # [k − K, K]
    order = promised.reshape(-1).argsort()[:tries]
    for flat in order.tolist():
        gained, lost = int(outside[flat // K]), int(inside[flat % K])
        moved = outputs + surrogate.difference(gained, lost) / K
        swapped = sorted([*(i for i in chosen if i != lost), gained])
        yield Swap(swapped, gained, lost, surrogate.loss(moved, sample))


def _best_of_all(surrogate: Surrogate, K: int, sample: Sample | None) -> list[int]:
    k = surrogate.k
    subsets = [list(chosen) for chosen in combinations(range(k), K)]
    losses = [surrogate.loss(surrogate.mix(mean(chosen, k)), sample) for chosen in subsets]
    # of equals, the later checkpoints
    return min(
        zip(losses, subsets, strict=True),
        key=lambda pair: (pair[0] if isfinite(pair[0]) else inf, [-i for i in pair[1][::-1]]),
    )[1]


def mean(chosen: Sequence[int], k: int) -> Tensor:
    """Equal weights on the chosen, [k] float64."""
    c = torch.zeros(k, dtype=torch.float64)
    c[list(chosen)] = 1 / len(chosen)
    return c
