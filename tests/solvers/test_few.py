"""The search for few, dear evaluations: a call scores an average on everything."""

from statistics import fmean

import pytest
import torch
from helpers.contests import outcome_of

from sewa_cli import solvers
from sewa_cli.direction import Criterion
from sewa_cli.events import Events
from sewa_cli.methods import mean_of
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Problem
from sewa_cli.solvers.board import Board, Failed

k = 80


class Descent:
    """A made-up run: it comes down to a minimum with noise on each checkpoint, and may leave it."""

    def __init__(self, seed, leaves=0.0, abreast=1):
        random = torch.Generator().manual_seed(seed)
        directions = torch.randn(2, 20, generator=random, dtype=torch.float64)
        steps = torch.arange(k, dtype=torch.float64)[:, None]
        self.W = 2 * directions[0] * torch.exp(-steps / 15) + directions[1] * leaves * steps / k
        self.W += 0.5 * torch.randn(k, 20, generator=random, dtype=torch.float64)
        self.calls, self.abreast = [], abreast

    def loss(self, average):
        return float((torch.tensor(average, dtype=torch.float64) @ self.W).square().sum())

    def evaluate(self, asked, _):
        for place, (average, _) in enumerate(asked):
            self.calls.append(average)
            yield place, self.answer(average)

    def answer(self, average):
        return [self.loss(average)]

    def choose(self, budget, K=AUTO):
        board = Board(
            *(Criterion("loss", "min"), torch.ones(1, dtype=torch.float64), self.evaluate),
            *(Events(), budget),
            whole=True,
            abreast=self.abreast,
        )
        trajectory = type("Trajectory", (), {"k": k})()
        problem = Problem(None, trajectory, 0, 0, Events(), board=board)
        race = solvers.find("race")
        return race(race.Settings()).choose(problem, K)


def latest(n):
    return tuple(mean_of(range(k - n, k), k))


@pytest.mark.parametrize("leaves", [0.0, 3.0])
@pytest.mark.parametrize("budget", [10, 20, 40])
def test_it_finds_better_averages_than_a_grid_of_the_last_n(budget, leaves):
    found, grid = [], []
    for seed in range(8):
        run = Descent(seed, leaves)
        choice = run.choose(budget)
        assert len(run.calls) == len({*run.calls}) <= budget
        found.append(run.loss(choice.coefficients))
        lengths = {round(k ** (i / (budget - 1))) for i in range(budget)}
        grid.append(min(run.loss(latest(n)) for n in lengths))
    assert fmean(found) < fmean(grid) * (1.02 if budget == 10 else 1.0)


def test_several_at_a_time_and_a_number_of_checkpoints_keep_to_the_budget():
    run = Descent(0, abreast=4)
    choice = run.choose(30)
    assert len(run.calls) == 30
    assert run.loss(choice.coefficients) < 1.2 * min(run.loss(latest(n)) for n in range(1, k + 1))
    run = Descent(0, leaves=3.0)
    choice = run.choose(30, K=10)
    assert sum(c != 0 for c in choice.coefficients) == 10
    assert run.loss(choice.coefficients) < run.loss(latest(10))
    assert outcome_of(choice).confirmed is None


def test_checkpoints_at_the_end_that_always_fail_are_left_behind():
    class Broken(Descent):
        def answer(self, average):
            return Failed("diverged") if any(average[-3:]) else [self.loss(average)]

    run = Broken(0)
    choice = run.choose(20)
    assert not any(choice.coefficients[-3:])
    assert run.loss(choice.coefficients) < 0.5 * min(run.loss(mean_of([i], k)) for i in range(k))
