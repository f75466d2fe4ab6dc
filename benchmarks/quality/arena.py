"""Episodes of many cloned policies side by side: what the sample's `scores` gives, but sooner.

Solvers that draw masks ask for two episodes of each, and then most of the time is forward passes
of a few rows. Here all policies that are asked for make their passes together. The returns are the
same to the bit, which the first of them are checked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sewa_cli.scoring.jobs import Job, PartScorer
from sewa_cli.task.scoring import Score

POLICIES = 16  # at the same time
ROWS = (4, 8)  # of a pass; with less than four a row is rounded in another way
CHECKED = 2  # jobs of each number of rows that the sample plays too


def arena_of(session: Any, metric: Any) -> Arena:
    task, model, seed = session.task, session.model, session.config.seed
    return Arena(PartScorer(task, model, seed, metric.judge.places, metric.judge.lists))


class Arena:
    """In the place of `scoring.workers.InProcess`, for the behaviour cloning sample."""

    def __init__(self, scorer: PartScorer) -> None:
        self.scorer = scorer
        self.model: Any = scorer.model.module  # the sample's Policy
        sample = sys.modules[type(self.model).__module__]
        self._game: Callable[[str, int], Any] = sample.environment
        self._left = dict.fromkeys(ROWS, CHECKED)

    def run(self, some: Iterable[Job], until: float | None = None) -> Iterator[tuple[int, Any]]:
        jobs = list(some)
        assert until is None  # budgets of evaluations only
        several = max((len(job.parts) for job in jobs), default=0) > ROWS[0]
        rows = ROWS[several]
        assert all(len(job.parts) <= rows for job in jobs)
        found = self._play(jobs, rows)
        some = min(self._left[rows], len(jobs))
        self._left[rows] -= some
        if [self.scorer.score(job) for job in jobs[:some]] != found[:some]:
            raise SystemExit("other returns than the sample's; benchmarks/quality/arena.py")
        yield from enumerate(found)

    def store(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.clone()

    def discard(self, stored: torch.Tensor) -> None: ...

    def warm(self) -> None: ...

    def close(self) -> None: ...

    def _play(self, jobs: Sequence[Job], rows: int) -> list[list[Score]]:
        size = min(POLICIES, len(jobs))
        games = [
            [self._game(self.model.env, rows * n + row) for row in range(rows)] for n in range(size)
        ]
        waiting = list(enumerate(jobs))[::-1]
        found: list[list[Score]] = [[] for _ in jobs]
        policies: list[list[torch.Tensor]] = []
        observations = np.zeros((size, rows, *self.model.mean.shape), np.float32)

        def begin(n: int) -> dict[int, Score]:
            place, job = waiting.pop()
            of, places = self.scorer.places[job.kind]
            seeds = [self.scorer.lists[of][places[part]] for part in job.parts]
            found[place] = [{"return": 0.0, "length": 0} for _ in seeds]
            for row, seed in enumerate(seeds):
                observations[n, row], _ = games[n][row].unwrapped.reset(seed=seed)
            self.scorer.model.set(job.weights)
            now = [tensor.detach().clone() for tensor in _tensors(self.model)]
            if n == len(policies):
                policies.append(now)
            else:
                policies[n] = now
                for stacked, tensor in zip(stack, now, strict=True):
                    stacked[n].copy_(tensor.view_as(stacked[n]))
            return dict(enumerate(found[place]))

        most = games[0][0].spec.max_episode_steps if games else 0
        running = [begin(n) for n in range(size)]
        stack = _stacked(policies)
        with torch.inference_mode():
            while running:
                actions = _passed(stack, observations).numpy()
                for n, episodes in enumerate(running):
                    for row, episode in list(episodes.items()):
                        step = games[n][row].unwrapped.step(actions[n, row])
                        observations[n, row], reward, terminated, truncated, _ = step
                        episode["return"] += float(reward)
                        episode["length"] += 1
                        if terminated or truncated or episode["length"] >= most:
                            del episodes[row]
                    if not episodes and waiting:
                        running[n] = begin(n)
                if 2 * sum(map(bool, running)) <= len(running):
                    kept = [n for n, episodes in enumerate(running) if episodes]
                    running = [running[n] for n in kept]
                    games = [games[n] for n in kept]
                    policies = [policies[n] for n in kept]
                    observations = observations[kept]
                    stack = _stacked(policies) if kept else []
        return found


def _tensors(model: Any) -> list[torch.Tensor]:
    return [model.mean, model.std, *(t for one in model.linear for t in (one.weight, one.bias))]


def _stacked(policies: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """[S, 1, n] of vectors, [S, n, m] of matrices."""
    some = (torch.stack(tensors) for tensors in zip(*policies, strict=True))
    return [one[:, None] if one.dim() == 2 else one for one in some]


def _passed(stack: Sequence[torch.Tensor], observations: Any) -> torch.Tensor:
    """Return what each policy's `forward` gives for its own rows."""
    mean, std, *linear = stack
    values = (torch.from_numpy(observations) - mean) / std
    last = len(linear) - 2
    for n in range(0, len(linear), 2):
        values = torch.baddbmm(linear[n + 1], values, linear[n].transpose(1, 2))
        values = torch.tanh_(values) if n == last else values.relu_()
    return values
