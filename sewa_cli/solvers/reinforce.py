"""The paper's other estimator: the policy gradient over Bernoulli masks, for what has no gradient.

    ∇_θ E[f(w(m))] = E[(f(w(m)) − b) ∇_θ log p(m | s)],    m_i ~ Bernoulli(s_i),
    w(m) = Σ m_i w_i / Σ m_i

M masks are drawn in each iteration and asked on the same parts (common random numbers); b is the
mean of the other M − 1 (leave-one-out), so that it has no say in a mask's own term. s = σ(θ + c)
with c such that Σ s = K, as for Gumbel-softmax: always in {0 ≤ s ≤ 1, Σ s = K}.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import cycle, islice
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.methods import by_steps, mean_of
from sewa_cli.report.findings import History, Mask
from sewa_cli.settings import Count, Positive, Share, WholeNumber
from sewa_cli.solvers import Choice, Problem, Solver, mask, register
from sewa_cli.solvers.board import Spent
from sewa_cli.solvers.contest import Contest, open_contest
from sewa_cli.solvers.mask import Adam

DECAY = 0.9  # of the running size of the advantages
IDLE = 20  # iterations with less than one new evaluation each: the search has settled


class Reinforce(Solver):
    """The paper's policy gradient by a metric; many cheap evaluations."""

    class Settings(Solver.Settings):
        samples: Annotated[WholeNumber, Field(ge=2)] = Field(
            8, description="M, masks drawn in each iteration"
        )
        parts: Count = Field(2, description="parts that score each mask")
        lr: Positive = Field(0.3, description="learning rate of Adam")
        search: Share = Field(0.7, description="share of the budget; the rest confirms")

    needs = frozenset({"parts"})
    settings: Settings

    def choose(self, problem: Problem, K: int) -> Choice:
        settings, contest = self.settings, open_contest(problem, K)
        k, board = contest.k, contest.board
        generator = torch.Generator().manual_seed(problem.seed)
        theta = torch.zeros(k, dtype=torch.float64)  # s = K/k: none is preferred at first
        adam, size = Adam(theta, settings.lr), 0.0
        history: list[float] = []
        parts = cycle(contest.searched)  # so that no part has its say more often than others
        spent: deque[int] = deque(maxlen=IDLE)
        left = contest.allowance(settings.search)
        with suppress(Spent):
            while left() >= settings.samples:
                spent.append(board.spent)
                if len(spent) == IDLE and spent[-1] - spent[0] < IDLE:
                    problem.events.note(
                        f"the search has settled after {board.spent} evaluations; the rest of the "
                        "budget confirms the choice"
                    )
                    break
                s = torch.sigmoid(mask.shifted_logits(theta, K))
                masks = _draw(s, settings.samples, generator)
                scores = _score(contest, masks, list(dict.fromkeys(islice(parts, settings.parts))))
                if scores is None:
                    continue
                history.append(float(scores.mean()))
                behind = board.criterion.lead(scores.mean(), scores)
                advantage = behind * len(scores) / (len(scores) - 1)
                now = float(advantage.square().mean())
                size = now if size == 0.0 else DECAY * size + (1 - DECAY) * now
                if size > 0:
                    theta = adam.step(_gradient(theta, K, masks, advantage / size**0.5))
        logits = mask.shifted_logits(theta, K)
        leader = contest.incumbent
        latest = by_steps(mean_of(range(k - K, k), k), problem.counts)
        if contest.is_open:  # a search among masks has asked no baseline
            both = contest.last, contest.enter("latest", K, latest)
            with suppress(Spent):
                for part in islice(parts, min(len(contest.searched), board.left // 6)):
                    board.ask([(entrant.average, [part]) for entrant in both])
        if history:
            leader = contest.enter("mask", K, mean_of(mask.largest(logits, K), k))
        learned = Mask(probabilities=torch.sigmoid(logits).tolist())
        return contest.decide(leader).having(History(values=history), learned)


def _score(contest: Contest, masks: Tensor, parts: list[int]) -> Tensor | None:
    """Return mean scores [M] of masks [M, k] on the same parts; None: all of these parts fail."""
    board = contest.board
    averages = [tuple(mean_of(m.nonzero().flatten().tolist(), contest.k)) for m in masks]
    board.ask([(average, parts) for average in averages])
    bad = board.bad
    good = [part for part in parts if part not in bad]
    if not good or not board.has_scores:
        return None
    return torch.tensor([board.mean(a, good) for a in averages], dtype=torch.float64)


def _draw(s: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw masks [M, k] of at least one checkpoint each."""
    masks = torch.rand(count, len(s), dtype=torch.float64, generator=generator) < s
    empty = ~masks.any(dim=1)
    masks[empty, int(s.argmax())] = True
    return masks


def _gradient(theta: Tensor, K: int, masks: Tensor, advantage: Tensor) -> Tensor:
    """Return the gradient of the mean of what is minimised, in θ [k]."""
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_(True)
        logits = mask.shifted_logits(leaf, K)
        signs = 2.0 * masks.double() - 1.0
        log_p = torch.nn.functional.logsigmoid(signs * logits).sum(dim=1)  # [M]
        (gradient,) = torch.autograd.grad((advantage * log_p).mean(), leaf)
    return gradient


register("reinforce", Reinforce)
