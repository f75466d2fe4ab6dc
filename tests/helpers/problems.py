"""Problems for solvers, without files: a W of one's own and any function of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from sewa_cli.events import Events
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.rng import seed_of, seeded
from sewa_cli.solvers import Problem
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.tiers import Dense

CPU = torch.device("cpu")


class Function:
    """An objective that is a function of the weights alone, with its gradient."""

    offers = frozenset({"value", "gradient"})

    def __init__(self, gradient: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._gradient = gradient

    def value(self, flat: Tensor) -> float:
        return float(self._gradient(flat)[0])

    def gradient(self, flat: Tensor, batches: list[Any]) -> tuple[Tensor, Tensor]:
        assert len(batches) >= 1
        return self._gradient(flat)

    def recall(self, _key: object, work: Callable[[], Any], draw: int = 0) -> Any:
        with seeded(seed_of(0, draw)):
            return work()

    def batches(self) -> Iterator[int]:
        while True:
            yield 0


def dense(W: Tensor) -> Dense:
    """W [k, P] as the weights of one linear layer."""
    return Dense(W, FlatModel(nn.Linear(W.shape[1], 1, bias=False), CPU).layout)


def problem_of(objective: object, trajectory: Trajectory, seed: int = 0) -> Problem:
    return Problem(cast(Objective, objective), trajectory, 10**9, seed, Events())
