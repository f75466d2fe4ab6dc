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

from sewa_cli.config import GumbelConfig
from sewa_cli.solvers import LossAndGradient, Solution, mask
from sewa_cli.solvers.adam import Adam
from sewa_cli.trajectory import Trajectory

CHECK_EVERY = 10  # iterations; looking at a number on a device means waiting for it
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
    variable = _start(k, K, settings.parametrization).to(device, dtype)
    lr = settings.lr if settings.lr is not None else LEARNING_RATES[settings.parametrization]
    adam = Adam(variable, lr)

    M = settings.samples
    layout = trajectory.layout
    flats = torch.empty(M, layout.size, dtype=torch.float32, device=device)
    gradients = torch.empty(M, layout.parameters, dtype=torch.float32, device=device)
    history: list[Tensor] = []
    for iteration in range(settings.iterations):
        t = mask.anneal(
            settings.temperature, settings.temperature_end, iteration, settings.iterations
        )
        noise = mask.logistic_noise(M, k, generator).to(device, dtype)
        with torch.enable_grad():  # whatever the user's code has left it at
            leaf = variable.detach().requires_grad_(True)
            log_masks = mask.relax(_logits(leaf, K, settings.parametrization), noise, t)
            a = mask.coefficients(log_masks, K, settings.normalize)  # [M, k]

        trajectory.mix(a.detach(), out=flats)
        if next_batches is not None:
            next_batches()
        total = torch.zeros((), dtype=torch.float32, device=device)
        for sample in range(M):
            loss, gradient = loss_and_gradient(flats[sample])
            gradients[sample].copy_(gradient)
            total += loss.to(device)
        grad_a = trajectory.pull_back(gradients).to(dtype) / M

        (gradient,) = torch.autograd.grad(a, leaf, grad_a)
        variable = adam.step(gradient)
        if settings.parametrization == "projected":
            variable.copy_(mask.project(variable, K))
        history.append(total / M)
        if on_iteration is not None:
            on_iteration(iteration, history[-1])
        if iteration % CHECK_EVERY == 0:
            _check_finite(variable)

    _check_finite(variable)
    logits = _logits(variable, K, settings.parametrization).cpu()
    return Solution(
        probabilities=torch.sigmoid(logits).tolist(),
        selected=mask.largest(logits, K),  # the order of s, but still apart where s rounds to 1
        history=torch.stack(history).cpu().tolist(),
    )


def _check_finite(variable: Tensor) -> None:
    if not torch.isfinite(variable).all():
        raise ValueError("the loss or its gradient became NaN or Inf while learning the mask")


def _start(k: int, K: int, parametrization: str) -> Tensor:
    """s = K/k everywhere: no checkpoint is preferred before the first gradient."""
    return torch.zeros(k) if parametrization == "logits" else torch.full((k,), K / k)


def _logits(variable: Tensor, K: int, parametrization: str) -> Tensor:
    """log s − log(1 − s), [k]."""
    if parametrization == "logits":
        return mask.shifted_logits(variable, K)
    return torch.logit(variable)
