"""Coefficients on the simplex, from a prior to what the data favour.

    min over c ≥ 0, Σ c = 1 of  L(c) + λ·L₀·KL(c ‖ π),   L₀ the loss at π

for falling λ, each solution begun at the one before. By mirror descent, whose steps have a closed
form in log c and keep c on the simplex: log c⁺ = (log c/η + λL₀·log π − g) / (1/η + λL₀) − const. A
step is taken if (g⁺ − g)·(c⁺ − c) ≤ KL(c⁺ ‖ c)/η, which for a convex L is enough for it to go down;
else η falls. Measured on three real runs: with 8 evaluations for each λ the loss is within 10⁻⁴ of
what 300 come to.

Many such problems, on other examples each, are solved side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sewa_cli.solvers.outputs.predictions import Gradient

EVALUATIONS = 8  # of the gradient, for each λ
ROUNDING = 1e-7  # of the loss: float32 outputs are no better than that
FLOOR = 0.03  # of the prior is spread evenly: a coefficient of zero could never grow


def path(
    gradient: Gradient,
    priors: Tensor,
    scale: Tensor,
    strengths: Sequence[float],
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Tensor:
    """Solve p problems with priors π [p, k] and losses L₀ [p] for falling λ; [λ, p, k] float64."""
    log_prior = ((1 - FLOOR) * priors + FLOOR / priors.shape[1]).log()
    x, c = log_prior.clone(), log_prior.exp()  # log c, and c
    g = gradient(c)
    # the first step moves no coefficient by more than a factor of e
    spread = g - (c * g).sum(1, keepdim=True)
    eta = 1 / spread.abs().amax(1).clamp_min(1e-300)
    found: list[Tensor] = []
    for strength in strengths:
        pull = (strength * scale.abs())[:, None]
        good = eta
        for evaluation in range(1, EVALUATIONS + 1):
            rate = 1 / eta[:, None]
            y = (rate * x + pull * log_prior - g) / (rate + pull)
            y = y - torch.logsumexp(y, 1, keepdim=True)
            moved, slope = y.exp(), gradient(y.exp())
            bend = ((slope - g) * (moved - c)).sum(1)
            taken = bend <= (moved * (y - x)).sum(1) / eta + ROUNDING * scale.abs()
            here = taken[:, None]
            x, c, g = (
                torch.where(here, y, x),
                torch.where(here, moved, c),
                torch.where(here, slope, g),
            )
            good = torch.where(taken, eta, good)
            eta = torch.where(taken, 1.6 * eta, eta / 3)
            progress(len(found) * EVALUATIONS + evaluation, len(strengths) * EVALUATIONS)
        eta = good  # at rest every step fails by rounding: that says nothing of the next λ
        found.append(c)
    return torch.stack(found)
