"""SeWA's own solver: Algorithm 1, a Gumbel-softmax mask learned by back-propagation.

Each iteration draws M relaxed masks, mixes the checkpoints with them, takes the loss and its
gradient at each mixture, and pulls the gradients back to the k probabilities:

    m̃ = σ((logit s + g₁ − g₀) / t),   a = m̃ / Σ m̃,   w = a·W,   min over s of (1/M) Σ L(w)

s stays in the feasible set in one of two ways. `logits`: s = σ(θ + c), c such that Σ s = K.
`projected`: s itself is the variable, projected onto {0 ≤ s ≤ 1, Σ s ≤ K} after each step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sewa_cli import mask
from sewa_cli.config import GumbelConfig
from sewa_cli.solvers import LossAndGradient, Solution
from sewa_cli.trajectory import Trajectory

LEARNING_RATES = {"logits": 0.3, "projected": 0.05}


def solve(
    trajectory: Trajectory,
    loss_and_gradient: LossAndGradient,
    K: int,
    settings: GumbelConfig,
    seed: int = 0,
    next_batches: Callable[[], None] | None = None,
    on_iteration: Callable[[int, Tensor], None] | None = None,
) -> Solution:
    """Learn s [k] and return its K largest.

    `next_batches` is called once before each iteration, so that its M samples see the same data.
    `on_iteration` gets the iteration and the mean loss as a 0-d tensor, still on the device.
    """
    k = trajectory.k
    if not 0 < K < k:
        raise ValueError(f"K must lie between 1 and {k - 1}, found {K}")
    device = trajectory.device
    # float64 costs nothing at length k; MPS has none
    dtype = torch.float32 if device.type == "mps" else torch.float64
    generator = torch.Generator().manual_seed(seed)
    variable = _start(k, K, settings.parametrization).to(device, dtype).requires_grad_(True)
    lr = settings.lr if settings.lr is not None else LEARNING_RATES[settings.parametrization]
    optimizer = torch.optim.Adam([variable], lr=lr)

    M = settings.samples
    layout = trajectory.layout
    flats = torch.empty(M, layout.size, device=device)
    gradients = torch.empty(M, layout.parameters, device=device)
    history: list[Tensor] = []
    for iteration in range(settings.iterations):
        t = mask.anneal(
            settings.temperature, settings.temperature_end, iteration, settings.iterations
        )
        noise = mask.logistic_noise(M, k, generator).to(device, dtype)
        masks = mask.relax(_logits(variable, K, settings.parametrization), noise, t)
        a = mask.coefficients(masks, K, settings.normalize)  # [M, k]

        trajectory.mix(a.detach(), out=flats)
        if next_batches is not None:
            next_batches()
        total = torch.zeros((), device=device)
        for sample in range(M):
            loss, gradient = loss_and_gradient(flats[sample])
            gradients[sample].copy_(gradient)
            total += loss.to(device)
        grad_a = trajectory.pull_back(gradients).to(dtype) / M

        (variable.grad,) = torch.autograd.grad(a, variable, grad_a)
        optimizer.step()
        if settings.parametrization == "projected":
            with torch.no_grad():
                variable.copy_(mask.project(variable, K))
        history.append(total / M)
        if on_iteration is not None:
            on_iteration(iteration, history[-1])

    with torch.no_grad():
        logits = _logits(variable, K, settings.parametrization).cpu()
    if not torch.isfinite(logits).all():
        raise ValueError("the loss or its gradient became NaN or Inf while learning the mask")
    return Solution(
        probabilities=torch.sigmoid(logits).tolist(),
        selected=mask.largest(logits, K),  # the order of s, but still apart where s rounds to 1
        history=torch.stack(history).cpu().tolist(),
    )


def _start(k: int, K: int, parametrization: str) -> Tensor:
    """s = K/k everywhere: no checkpoint is preferred before the first gradient."""
    return torch.zeros(k) if parametrization == "logits" else torch.full((k,), K / k)


def _logits(variable: Tensor, K: int, parametrization: str) -> Tensor:
    """log s − log(1 − s), [k]."""
    if parametrization == "logits":
        return mask.shifted_logits(variable, K)
    return torch.logit(variable)
