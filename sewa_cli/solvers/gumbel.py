"""SeWA's own solver: Algorithm 1, a Gumbel-softmax mask learned by back-propagation.

Each iteration draws M relaxed masks, mixes the checkpoints with them, takes the loss and its
gradient at each mixture, and pulls the gradients back to the k probabilities:

    m̃ = σ((logit s + g₁ − g₀) / t),   a = m̃ / Σ m̃,   w = a·W,   min over s of (1/M) Σ L(w)

s stays in the feasible set in one of two ways. `logits`: s = σ(θ + c), c such that Σ s = K.
`projected`: s itself is the variable, projected onto {0 ≤ s ≤ 1, Σ s ≤ K} after each step.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.settings import Count, Positive
from sewa_cli.solvers import Choice, Cost, Problem, Sizes, Solver, mask, register
from sewa_cli.solvers.adam import Adam

CHECK_EVERY = 10  # iterations; looking at a number on a device means waiting for it
LEARNING_RATES = {"logits": 0.3, "projected": 0.05}


class Gumbel(Solver):
    """The paper's: a Gumbel-softmax mask, learned by back-propagation through averages."""

    class Settings(Solver.Settings):
        iterations: Count = 100
        samples: Count = Field(2, description="M, masks drawn in each iteration")
        temperature: Positive = Field(0.5, description="t of the Gumbel-softmax")
        temperature_end: Positive | None = Field(
            None, description="anneal geometrically from `temperature` to this; null: constant"
        )
        lr: Positive | None = Field(
            None, description="Adam's; null: 0.3 for logits, 0.05 for projected"
        )
        batches: Count = Field(1, description="selection batches used in each iteration")
        normalize: Literal["sum", "paper"] = Field(
            "sum", description="divide the mixed weights by the sum of the mask, or by K"
        )
        parametrization: Literal["logits", "projected"] = "logits"

    needs = frozenset({"gradient"})
    settings: Settings

    @property
    def vectors(self) -> int:
        return 2 * self.settings.samples

    def cost(self, sizes: Sizes) -> Cost:  # noqa: ARG002 - k and K change nothing
        passes = self.settings.iterations * self.settings.samples * self.settings.batches
        return Cost(forward=passes, backward=passes, products=2 * self.settings.iterations)

    def choose(self, problem: Problem, K: int) -> Choice:
        """Learn s [k], take its K largest. The M samples of an iteration see the same batches."""
        settings, trajectory, objective = self.settings, problem.trajectory, problem.objective
        k = trajectory.k
        if not 0 < K < k:
            raise ValueError(f"K must lie between 1 and {k - 1}, found {K}")
        device = trajectory.device
        # float64 costs nothing at length k; MPS has none
        dtype = torch.float32 if device.type == "mps" else torch.float64
        generator = torch.Generator().manual_seed(problem.seed)
        variable = self._start(k, K).to(device, dtype)
        adam = Adam(variable, settings.lr or LEARNING_RATES[settings.parametrization])
        M, layout, batches = settings.samples, trajectory.layout, objective.batches()
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
                log_masks = mask.relax(self._logits(leaf, K), noise, t)
                a = mask.coefficients(log_masks, K, settings.normalize)  # [M, k]

            trajectory.mix(a.detach(), out=flats)
            some = [next(batches) for _ in range(settings.batches)]
            total = torch.zeros((), dtype=torch.float32, device=device)
            for sample in range(M):
                loss, gradient = objective.gradient(flats[sample], some)
                gradients[sample].copy_(gradient)
                total += loss.to(device)
            grad_a = trajectory.pull_back(gradients).to(dtype) / M

            (gradient,) = torch.autograd.grad(a, leaf, grad_a)
            variable = adam.step(gradient)
            if settings.parametrization == "projected":
                variable.copy_(mask.project(variable, K))
            history.append(total / M)
            problem.events.progress(
                "learning", iteration + 1, settings.iterations, float(history[-1])
            )
            if iteration % CHECK_EVERY == 0:
                _check_finite(variable)

        _check_finite(variable)
        logits = self._logits(variable, K).cpu()
        return Choice.of(
            mask.largest(logits, K),  # the order of s, but still apart where s rounds to 1
            k,
            probabilities=torch.sigmoid(logits).tolist(),
            history=torch.stack(history).cpu().tolist(),
        )

    def _start(self, k: int, K: int) -> Tensor:
        """s = K/k everywhere: no checkpoint is preferred before the first gradient."""
        in_logits = self.settings.parametrization == "logits"
        return torch.zeros(k) if in_logits else torch.full((k,), K / k)

    def _logits(self, variable: Tensor, K: int) -> Tensor:
        """log s − log(1 − s), [k]."""
        if self.settings.parametrization == "logits":
            return mask.shifted_logits(variable, K)
        return torch.logit(variable)


def _check_finite(variable: Tensor) -> None:
    if not torch.isfinite(variable).all():
        raise TaskError("the loss or its gradient became NaN or Inf while learning the mask")


register("gumbel", Gumbel)
