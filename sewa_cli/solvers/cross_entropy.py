"""The cross-entropy method: masks of K are drawn, and the best of them say how to draw the next.

N masks in each round, drawn without replacement by the odds of s; all are asked on the same parts;
s moves by `step` towards how often each checkpoint is in the elite. s stays between the floor and
its mirror image, so that nothing is ruled out for good, and Σ s = K throughout.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.objective.board import Spent
from sewa_cli.settings import Count, Share, Whole
from sewa_cli.solvers import Choice, Problem, Solver, mask, register
from sewa_cli.solvers.contest import Contest, within

FLOOR = 0.05  # of K/k: what s never falls below


class CrossEntropy(Solver):
    """By a metric: masks of K, drawn again and again around the best (cross-entropy method)."""

    class Settings(Solver.Settings):
        samples: Annotated[Whole, Field(ge=4)] = Field(20, description="masks drawn in each round")
        elite: Share = Field(0.25, description="of them, the best, that move s")
        step: Share = Field(0.4, description="how far s moves towards the elite")
        parts: Count = Field(2, description="that the masks of a round are asked on")
        search: Share = Field(0.7, description="of the budget; the rest is for the duel")

    needs = frozenset({"parts"})
    settings: Settings

    def choose(self, problem: Problem, K: int) -> Choice:
        settings, contest = self.settings, Contest(problem, K)
        k = contest.k
        generator = torch.Generator().manual_seed(problem.seed)
        s = torch.full((k,), K / k, dtype=torch.float64)
        elite = max(1, round(settings.elite * settings.samples))
        history: list[float] = []
        left = within(settings.search, contest)
        with suppress(Spent):
            while left() >= settings.samples and contest.goes_on():
                masks = _draw(s, K, settings.samples, generator)
                losses = contest.score_masks(masks, settings.parts)
                if losses is None:
                    continue
                history.append(float(losses.mean()))
                best = torch.argsort(losses, stable=True)[:elite]
                s = _bounded(torch.lerp(s, masks[best].double().mean(dim=0), settings.step), K)
        details = {"rounds": len(history)}
        return contest.crown_mask(s, K, history, probabilities=s.tolist(), details=details)


def _draw(s: Tensor, K: int, count: int, generator: torch.Generator) -> Tensor:
    """Masks [N, k] of exactly K: the largest of logit s + Gumbel noise, drawn anew for each."""
    noise = torch.rand(count, len(s), dtype=torch.float64, generator=generator)
    keys = torch.logit(s, eps=1e-9) - torch.log(-torch.log(noise.clamp_min(1e-300)))
    masks = torch.zeros(count, len(s), dtype=torch.bool)
    return masks.scatter_(1, keys.topk(K, dim=1).indices, True)


def _bounded(s: Tensor, K: int) -> Tensor:
    """Between the floor and its mirror image, with the sum K."""
    k = len(s)
    low, high = FLOOR * K / k, 1 - FLOOR * (k - K) / k
    inner = (s - low) / (high - low)
    return low + (high - low) * mask.project_to_sum(inner, (K - low * k) / (high - low))


register("cross-entropy", CrossEntropy)
