"""SeWA's own solver: Algorithm 1, a Gumbel-softmax mask learned by back-propagation.

Each iteration draws M relaxed masks, mixes the checkpoints with them, takes the loss and its
gradient at each mixture, and pulls the gradients back to the k probabilities:

    m̃ = σ((logit s + g₁ − g₀) / t),   a = m̃ / Σ m̃,   w = a·W,   min over s of (1/M) Σ L(w)

s = σ(θ + c) with c such that Σ s = K, so s stays feasible whatever θ is. (Projecting s itself onto
the feasible set after each step, and cooling t, were measured to gain nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.objective.memo import Tensors
from sewa_cli.report.findings import History, Mask
from sewa_cli.settings import Count, Positive, WholeNumber
from sewa_cli.solvers import Choice, Plan, Problem, Sizes, Solver, Stage, mask, register
from sewa_cli.solvers.mask import Adam

CHECK_EVERY = 10  # iterations; looking at a number on a device means waiting for it
SURE = 1.0  # standard errors by which the loss must have fallen to be still falling


class Gumbel(Solver):
    """The paper's: a Gumbel-softmax mask, learned by back-propagation."""

    class Settings(Solver.Settings):
        iterations: Count = 100
        samples: Count = Field(2, description="M, masks drawn in each iteration")
        temperature: Positive = Field(0.5, description="t of the Gumbel-softmax")
        lr: Positive = Field(0.3, description="learning rate of Adam")
        batches: Count = Field(1, description="selection batches used in each iteration")
        patience: Annotated[WholeNumber, Field(ge=CHECK_EVERY)] = Field(
            50, description="stop after this many iterations without a new set or a lower loss"
        )
        normalize: Literal["sum", "paper"] = Field(
            "sum", description="divide the mixed weights by the sum of the mask, or by K"
        )

    needs = frozenset({"gradient"})
    settings: Settings

    @property
    def vectors(self) -> int:
        return 2 * self.settings.samples

    def plan(self, sizes: Sizes) -> Plan:
        one = self.settings
        passes = one.iterations * one.samples * one.batches / sizes.batches
        sure = min(1.0, one.patience / one.iterations)
        products = 2 * one.iterations
        return Plan([Stage("learning", passes, passes, products=products, at_least=sure)])

    def choose(self, problem: Problem, K: int) -> Choice:
        """Learn s [k], take its K largest. The M samples of an iteration see the same batches."""
        settings, trajectory, objective = self.settings, problem.trajectory, problem.objective
        k = trajectory.k
        device = trajectory.device
        # float64 costs nothing at length k; MPS has none
        dtype = torch.float32 if device.type == "mps" else torch.float64
        generator = torch.Generator().manual_seed(problem.seed)
        theta = torch.zeros(k, device=device, dtype=dtype)  # s = K/k: none is preferred at first
        adam = Adam(theta, settings.lr)
        M, layout, batches = settings.samples, trajectory.layout, objective.batches()
        flats = torch.empty(M, layout.size, dtype=torch.float32, device=device)
        gradients = torch.empty(M, layout.parameters, dtype=torch.float32, device=device)
        history: list[Tensor] = []
        rest, shown = _Rest(settings.patience), None

        def learn(a: Tensor, some: list[Any]) -> Tensors:
            """The loss at mixtures a [M, k], and its gradient in each of them."""
            trajectory.mix(a, out=flats)
            total = torch.zeros((), dtype=torch.float32, device=device)
            for sample in problem.events.over("masks", range(M), M):
                loss, gradient = objective.gradient(flats[sample], some)
                gradients[sample].copy_(gradient)
                total += loss.to(device)
            return {"loss": total / M, "gradient": trajectory.pull_back(gradients)}

        for iteration in range(settings.iterations):
            noise = mask.logistic_noise(M, k, generator).to(device, dtype)
            with torch.enable_grad():  # whatever the user's code has left it at
                leaf = theta.detach().requires_grad_(True)
                log_masks = mask.relax(mask.shifted_logits(leaf, K), noise, settings.temperature)
                a = mask.coefficients(log_masks, K, settings.normalize)  # [M, k]

            some = [next(batches) for _ in range(settings.batches)]
            key = ("gradient", trajectory.kind, a.detach(), some)
            learned = partial(learn, a.detach(), some)
            found = objective.recall(key, learned, draw=iteration)
            grad_a = found["gradient"].to(device, dtype) / M
            (gradient,) = torch.autograd.grad(a, leaf, grad_a)
            theta = adam.step(gradient)
            history.append(found["loss"].to(device))
            if iteration % CHECK_EVERY == 0:
                shown = float(history[-1])
            problem.events.progress("learning", iteration + 1, settings.iterations, shown)
            if iteration % CHECK_EVERY == 0:
                _check_finite(theta)
                if rest.has_come(mask.largest(theta, K), history):
                    problem.events.progress("learning", iteration + 1, iteration + 1)
                    break

        _check_finite(theta)
        logits = mask.shifted_logits(theta, K).cpu()
        return Choice.of(
            mask.largest(logits, K),  # the order of s, but still apart where s rounds to 1
            k,
            Mask(probabilities=torch.sigmoid(logits).tolist()),
            History(values=torch.stack(history).cpu().tolist(), at_most=settings.iterations),
        )


@dataclass
class _Rest:
    """Tell whether the same set was found for `patience` iterations and the loss has settled.

    Single iterations have other batches and masks each, so the means over the two halves of these
    iterations are compared, by their standard error.
    """

    _patience: int
    _chosen: Sequence[int] = ()
    _since: int = 0

    def has_come(self, chosen: list[int], history: list[Tensor]) -> bool:
        if chosen != self._chosen:
            self._chosen, self._since = chosen, len(history)
        if len(history) - self._since < self._patience:
            return False
        lately = torch.stack(history[-self._patience :]).cpu().double()
        before, after = lately.tensor_split(2)
        error = (before.var() / len(before) + after.var() / len(after)).sqrt()
        return bool(before.mean() - after.mean() <= SURE * error.nan_to_num(0.0))


def _check_finite(theta: Tensor) -> None:
    if not torch.isfinite(theta).all():
        raise TaskError("the loss or its gradient became NaN or Inf; lower gumbel.lr")


register("gumbel", Gumbel)
