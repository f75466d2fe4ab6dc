"""The paper's other estimator: the policy gradient over Bernoulli masks, for what has no gradient.

    ∇_θ E[f(w(m))] = E[(f(w(m)) − b) ∇_θ log p(m | s)],    m_i ~ Bernoulli(s_i),
    w(m) = Σ m_i w_i / Σ m_i

M masks are drawn in each iteration and asked on the same parts (common random numbers); b is the
mean of the other M − 1 (leave-one-out), so that it has no say in a mask's own term. s = σ(θ + c)
with c such that Σ s = K, as for Gumbel-softmax: always in {0 ≤ s ≤ 1, Σ s = K}.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.objective.board import Spent
from sewa_cli.settings import Count, Positive, Share, Whole
from sewa_cli.solvers import Choice, Problem, Solver, mask, register
from sewa_cli.solvers.adam import Adam
from sewa_cli.solvers.contest import Contest, within

DECAY = 0.9  # of the running size of the advantages


class Reinforce(Solver):
    """By a metric: the paper's policy gradient over masks of K; needs many cheap evaluations."""

    class Settings(Solver.Settings):
        samples: Annotated[Whole, Field(ge=2)] = Field(
            8, description="M, masks drawn in each iteration"
        )
        parts: Count = Field(2, description="that the masks of an iteration are asked on")
        lr: Positive = Field(0.3, description="Adam's")
        search: Share = Field(0.7, description="of the budget; the rest is for the duel")

    needs = frozenset({"parts"})
    settings: Settings

    def choose(self, problem: Problem, K: int) -> Choice:
        settings, contest = self.settings, Contest(problem, K)
        k = contest.k
        generator = torch.Generator().manual_seed(problem.seed)
        theta = torch.zeros(k, dtype=torch.float64)  # s = K/k: none is preferred at first
        adam, size = Adam(theta, settings.lr), 0.0
        history: list[float] = []
        left = within(settings.search, contest)
        with suppress(Spent):
            while left() >= settings.samples and contest.goes_on():
                s = torch.sigmoid(mask.shifted_logits(theta, K))
                masks = _draw(s, settings.samples, generator)
                losses = contest.score_masks(masks, settings.parts)
                if losses is None:
                    continue
                history.append(float(losses.mean()))
                advantage = (losses - losses.mean()) * len(losses) / (len(losses) - 1)
                now = float(advantage.square().mean())
                size = now if size == 0.0 else DECAY * size + (1 - DECAY) * now
                if size > 0:
                    theta = adam.step(_gradient(theta, K, masks, advantage / size**0.5))
        logits = mask.shifted_logits(theta, K)
        final, details = torch.sigmoid(logits).tolist(), {"iterations": len(history)}
        return contest.crown_mask(logits, K, history, probabilities=final, details=details)


def _draw(s: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Masks [M, k] of at least one checkpoint each."""
    masks = torch.rand(count, len(s), dtype=torch.float64, generator=generator) < s
    empty = ~masks.any(dim=1)
    masks[empty, int(s.argmax())] = True
    return masks


def _gradient(theta: Tensor, K: int, masks: Tensor, advantage: Tensor) -> Tensor:
    """Of the mean loss in θ [k]."""
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_(True)
        logits = mask.shifted_logits(leaf, K)
        signs = 2.0 * masks.double() - 1.0
        log_p = torch.nn.functional.logsigmoid(signs * logits).sum(dim=1)  # [M]
        (gradient,) = torch.autograd.grad((advantage * log_p).mean(), leaf)
    return gradient


register("reinforce", Reinforce)
