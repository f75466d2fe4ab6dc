"""How much of what there is to gain do contests gain? By a metric that is made up, so all is known.

`python benchmarks/contests.py`; some minutes. Of a run of 200 checkpoints an average is the better
the nearer its middle is to seven tenths of the run and the more it averages, and by luck of its own
(*spread*); each part adds noise that all averages share, and noise of its own, 0.7. There is no
loss. *led* and *written*: how much better than the mean of all checkpoints (of the last ten for
`reinforce`), as a share of what the best of all averages that were asked would have been. The
numbers are means over 24 contests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import torch

from sewa_cli import solvers
from sewa_cli.direction import Criterion
from sewa_cli.events import Events
from sewa_cli.methods import mean_of
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Problem
from sewa_cli.solvers.board import Asked, Average, Board
from sewa_cli.solvers.contest import Outcome

k, PARTS, CONTESTS = 200, 600, 24
BUDGETS = (100, 500, 2000, 5000)
SOLVERS = {"race": AUTO, "reinforce": 10}


class World:
    def __init__(self, seed: int, spread: float, budget: int) -> None:
        self.seed, self.spread = seed, spread
        self.levels: dict[Average, float] = {}
        weights, loss = torch.ones(PARTS, dtype=torch.float64), Criterion("loss", "min")
        self.board = Board(loss, weights, self._evaluate, Events(), evaluations=budget)

    def level(self, average: Average) -> float:
        if average not in self.levels:
            middle = sum(i * c for i, c in enumerate(average)) / k
            few = sum(c * c for c in average) ** 0.5
            luck = Random(f"{self.seed} {average}").gauss()
            self.levels[average] = abs(middle - 0.7) + few + self.spread * luck
        return self.levels[average]

    def _evaluate(
        self, asked: Sequence[Asked], _: float | None
    ) -> Iterator[tuple[int, list[float]]]:
        for place, (average, parts) in enumerate(asked):
            shared = [Random(f"{self.seed} {part}").gauss() for part in parts]
            own = [Random(f"{self.seed} {average} {part}").gauss(0, 0.7) for part in parts]
            yield place, [self.level(average) + a + b for a, b in zip(shared, own, strict=True)]

    def gains(self, solver: str, K: int) -> tuple[float, float, float]:
        """Return those of the leader, of the written average, and of the best that was asked."""
        problem = Problem(
            *(cast(Any, None), cast(Any, SimpleNamespace(k=k)), 10**9, self.seed, Events()),
            board=self.board,
        )
        found = solvers.find(solver)
        choice = found(found.Settings()).choose(problem, K)
        outcome = choice.find(Outcome)
        start = self.level(tuple(mean_of(range(k - (K or k), k), k)))
        ends = outcome.leader.average, tuple(choice.coefficients)
        led, written, most = (start - level for level in (*map(self.level, ends), self.lowest))
        return led, written, most

    @property
    def lowest(self) -> float:
        return min(self.levels.values())


def main() -> None:
    out = sys.stdout.write
    head = " | ".join(f"{budget:,}: led | written" for budget in BUDGETS)
    out(f"| solver | spread | {head} |\n|---|---:{'|---:' * 2 * len(BUDGETS)}|\n")
    for solver, K in SOLVERS.items():
        for spread in (0.1, 0.4):
            cells = []
            for budget in BUDGETS:
                found = [World(seed, spread, budget).gains(solver, K) for seed in range(CONTESTS)]
                led, written, most = map(fmean, zip(*found, strict=True))
                cells += [f"{led / most:.0%}", f"{written / most:.0%}"]
            out(f"| `{solver}` | {spread} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
