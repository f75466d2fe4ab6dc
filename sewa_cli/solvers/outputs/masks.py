"""K checkpoints with equal coefficients, by predicted losses.

    min over s of  L(Σ (s_i / K) y_i),   0 ≤ s ≤ 1,  Σ s = K

is convex wherever the user's loss is convex in the outputs. It is solved by spectral projected
gradient (Birgin, Martínez and Raydan 2000), rounded to its K largest, and improved by swapping one
chosen checkpoint for another that lowers the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sewa_cli.solvers import mask
from sewa_cli.solvers.outputs.predictions import Gradient, Predictions, mean

TOLERANCE = 1e-6  # of the loss; an improvement by less is none
STILL = 1e-12  # squared length of a step that leads nowhere
SWAPS = 50  # tried before the search ends


def relax(gradient: Gradient, K: int, starts: Tensor, evaluations: int) -> Tensor:
    """Solve p problems from s [p, k], by gradients alone; return s [p, k].

    The curvature of a step is what the one before it has shown. It is taken if (g⁺ − g)·(s⁺ − s)
    ≤ curvature·|s⁺ − s|², which for a convex loss is enough for it to go down; else the next one is
    shorter. A problem whose gradient is not finite stays where it is.
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
        # a direction that hardly bends must not be left in one step
        curvature = torch.where(taken, torch.maximum(seen, curvature / 10), 1.5 * seen)
    return s


def _project(v: Tensor, K: int) -> Tensor:
    return torch.stack([mask.project_to_sum(one, K) for one in v])


def improve(predictions: Predictions, chosen: Sequence[int]) -> list[int]:
    """Swap one checkpoint for another as long as that lowers the predicted loss.

    The swaps that the gradient promises most of are tried first.
    """
    k, now = predictions.k, sorted(chosen)
    for _ in range(2 * len(now)):
        loss, gradient = predictions.loss_and_gradient(mean(now, k))
        outside = [i for i in range(k) if i not in set(now)]
        promised = gradient[outside][:, None] - gradient[now][None, :]  # [k − K, K]
        order = promised.reshape(-1).argsort()[:SWAPS].tolist()
        tried = [
            sorted({*now, outside[place // len(now)]} - {now[place % len(now)]}) for place in order
        ]
        losses = [predictions.loss(mean(one, k)) for one in tried]
        if not min(losses) < loss - TOLERANCE * abs(loss):
            break
        now = tried[losses.index(min(losses))]
    return now
