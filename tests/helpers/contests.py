"""Contests without a model: any function of weights and part is the metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from sewa_cli import solvers
from sewa_cli.direction import Criterion
from sewa_cli.events import Events
from sewa_cli.objective.objective import Objective
from sewa_cli.solvers import Choice, Problem, board
from sewa_cli.solvers.board import Answer, Asked, Average, Board, Failed, Spent
from sewa_cli.solvers.contest import Outcome
from sewa_cli.trajectory import Trajectory

SOLVERS = ("race", "reinforce")
Loss = Callable[[Average, int], float | Failed]


class Played:
    """A board that records each call."""

    def __init__(
        self,
        loss: Loss,
        parts: int,
        budget: int | None,
        seconds: float | None = None,
        at_once: int = 1,
    ) -> None:
        self.calls: list[Asked] = []
        self.loss = loss
        self.board = Board(
            Criterion("loss", "min"),
            torch.ones(parts, dtype=torch.float64),
            self._evaluate,
            Events(),
            evaluations=budget,
            seconds=seconds,
            at_once=at_once,
        )

    def _evaluate(
        self, asked: Sequence[Asked], until: float | None
    ) -> Iterator[tuple[int, Answer]]:
        for place, one in enumerate(asked):
            if until is not None and board.time.monotonic() > until:
                return
            self.calls.append(one)
            found = [self.loss(one.average, part) for part in one.parts]
            failed = next((loss for loss in found if isinstance(loss, Failed)), None)
            yield place, failed or cast(list[float], found)

    @property
    def evaluations(self) -> int:
        return sum(len(call.parts) for call in self.calls)

    def problem(self, k: int, seed: int = 0, by_loss: Choice | None = None) -> Problem:
        return Problem(
            cast(Objective, None),
            cast(Trajectory, SimpleNamespace(k=k)),
            10**9,
            seed,
            Events(),
            board=self.board,
            by_loss=None if by_loss is None else lambda _: by_loss,
        )

    def choose(self, solver: str, k: int, K: int, seed: int = 0, **settings: Any) -> Choice:
        found = solvers.find(solver)
        return found(found.Settings(**settings)).choose(self.problem(k, seed), K)

    def ask(self, *wanted: tuple[Average, Sequence[int]]) -> bool:
        """Whether there was enough of the budget."""
        with suppress(Spent):
            self.board.ask(wanted)
            return True
        return False


def outcome_of(choice: Choice) -> Outcome:
    return choice.find(Outcome)


def drawn(seed: int, kind: str = "normal") -> Callable[[Average, int], float]:
    """Noise and nothing else, another for each average and each part."""

    def loss(average: Average, part: int) -> float:
        random = Random(hash((seed, average, part)))
        return random.gauss() / (random.gauss() if kind == "cauchy" else 1.0)

    return loss


def noise(n: int, generator: torch.Generator, kind: str = "normal") -> Tensor:
    normal = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "normal":
        return normal
    if kind == "cauchy":
        return normal / torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "lognormal":
        return (2 * normal).exp()
    assert kind == "signs"
    return normal.sign() * (torch.rand(n, generator=generator) < 0.5)
