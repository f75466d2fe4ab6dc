"""The mask over k checkpoints: sampling, staying in the feasible set, rounding.

All vectors here have length k (or shape [M, k]), so nothing in this module costs much. Everything
is differentiable by autograd where a solver needs it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_BISECTIONS = 60


def shifted_logits(theta: Tensor, total: float) -> Tensor:
    """θ + c with c such that Σ σ(θ_i + c) = total; [k] → [k], differentiable in θ.

    c is found by Newton's method, kept inside a bisected bracket, outside autograd. The last line
    adds nothing to its value, but carries the implicit derivative dc/dθ_j = −p_j / Σp, where
    p = σ'(θ + c).
    """
    k = theta.numel()
    with torch.no_grad():
        centre = math.log(total / (k - total))
        low, high = centre - theta.max(), centre - theta.min()  # Σσ ≤ total ≤ Σσ at these two
        c = (low + high) / 2
        for _ in range(_BISECTIONS):
            p = torch.sigmoid(theta + c)
            excess = p.sum() - total
            if theta.is_cpu and abs(excess) < 1e-12 * k:  # on a device, looking means waiting
                break
            low, high = torch.where(excess > 0, low, c), torch.where(excess > 0, c, high)
            newton = c - excess / (p * (1 - p)).sum()
            inside = (newton > low) & (newton < high)
            c = torch.where(inside, newton, (low + high) / 2)
        p = torch.sigmoid(theta + c)
        slope = (p * (1 - p)).sum().clamp_min(1e-12)  # all at 0 or 1: nothing moves, and not NaN
    shifted = theta + c
    reached = torch.sigmoid(shifted).sum()
    return shifted - (reached - reached.detach()) / slope


def project_to_sum(v: Tensor, total: float) -> Tensor:
    """The nearest point to v in {0 ≤ s ≤ 1, Σ s = total}; [k] → [k], float64.

    It is clip(v − τ, 0, 1). Its sum falls in straight lines between the 2k values of τ at which an
    element leaves 0 or 1; τ lies on the line that crosses `total`.
    """
    k = v.numel()
    x = v.double().cpu().numpy()  # NumPy: at this length, torch's calls cost more than their work
    both = np.concatenate([x - 1, x])
    order = np.argsort(both, kind="stable")
    bends = both[order]
    slopes = np.cumsum(np.where(order < k, -1.0, 1.0))  # of the sum, after each bend
    sums = k + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(bends))])
    tau = np.interp(-total, -sums, bends)  # the sums fall, and np.interp wants them to rise
    return torch.from_numpy(np.clip(x - tau, 0.0, 1.0)).to(v.device)


def logistic_noise(samples: int, k: int, generator: torch.Generator) -> Tensor:
    """g_i1 − g_i0 of two standard Gumbels, as one logistic draw log u − log(1 − u); [M, k] float64.

    The difference of two Gumbels is logistic, so this is Algorithm 1's noise with half the draws.
    Drawn on the CPU, so that every device sees the same masks.
    """
    u = torch.rand(samples, k, dtype=torch.float64, generator=generator, device=generator.device)
    return torch.logit(u, eps=1e-12)


def relax(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """log m̃, m̃ = σ((log s − log(1 − s) + g_1 − g_0) / t); logits [k], noise [M, k] → [M, k].

    As a logarithm, because a cold mask may round to zero everywhere, and then has no sum.
    """
    return torch.nn.functional.logsigmoid((logits + noise) / temperature)


def coefficients(log_masks: Tensor, K: int, normalize: str) -> Tensor:
    """Mixing weights of relaxed masks, [M, k] → [M, k]: m̃ / Σ m̃ (`sum`) or m̃ / K (`paper`).

    With 1/K the sum of the weights drifts from one and rescales every parameter of the network.
    """
    if normalize == "paper":
        return log_masks.exp() / K
    return log_masks.softmax(dim=-1)


def largest(s: Tensor, K: int) -> list[int]:
    """Indices of the K largest s, ascending. Among equals the later checkpoint wins."""
    order = torch.argsort(s.flip(0), descending=True, stable=True)[:K]
    return sorted(s.numel() - 1 - int(i) for i in order)


class Adam:
    """Adam (Kingma and Ba 2015) on one vector; constructing torch's takes a second of imports."""

    def __init__(self, variable: Tensor, lr: float) -> None:
        self.variable = variable
        self.lr = lr
        self.mean = torch.zeros_like(variable)
        self.square = torch.zeros_like(variable)
        self.steps = 0

    def step(self, gradient: Tensor, beta1: float = 0.9, beta2: float = 0.999) -> Tensor:
        self.steps += 1
        self.mean.lerp_(gradient, 1 - beta1)
        self.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (self.square / (1 - beta2**self.steps)).sqrt_().add_(1e-8)
        self.variable.addcdiv_(self.mean, size, value=-self.lr / (1 - beta1**self.steps))
        return self.variable
