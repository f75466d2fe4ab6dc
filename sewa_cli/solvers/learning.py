"""Has the configured solver choose: from a trajectory, or from checkpoints as they stream by."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.methods import mean_of
from sewa_cli.objective.objective import cycle
from sewa_cli.session.session import Bench, check_budget
from sewa_cli.solvers import Solution, gumbel
from sewa_cli.solvers.chosen import Chosen
from sewa_cli.solvers.crossvalidate import LEARNED
from sewa_cli.solvers.linear.rounds import Linear
from sewa_cli.solvers.linear.streaming import Streaming, stream
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.placement import Placed, place


class Solver(Protocol):
    def choose(self, K: int) -> Chosen: ...


def read_run(bench: Bench) -> Placed:
    """W where it fits, or, for the linear solver, as a stream that has gone by once."""
    K = bench.config.K
    return stream(bench, K) if bench.config.solver == "linear" else read_trajectory(bench, K)


def read_trajectory(bench: Bench, K: int, share: float = 1.0) -> Placed:
    """The checkpoints as W, where it fits; those with NaN or Inf are left out, or stop the run.

    `share`: of the cap on memory; a cache of outputs may need the rest.
    """
    placed = place(bench, share)
    check_budget(K, placed.used)
    return placed


def make_solver(bench: Bench, placed: Placed) -> Solver:
    if isinstance(placed, Streaming):
        solver = Linear(bench, placed.trajectory, placed.scouted, placed.room.left)
        solver.begin(bench.config.K)
        return solver
    return Gumbel(bench, placed.trajectory)


class Gumbel:
    """The paper's solver on a trajectory."""

    def __init__(self, bench: Bench, trajectory: Trajectory) -> None:
        self._bench = bench
        self._trajectory = trajectory

    def choose(self, K: int) -> Chosen:
        solution = learn(self._bench, self._trajectory, K)
        return Chosen(mean_of(solution.selected, self._trajectory.k), LEARNED, K, solution)


def learn(bench: Bench, trajectory: Trajectory, K: int) -> Solution:
    """The Gumbel solver's K of the trajectory's checkpoints."""
    config, objective = bench.config, bench.objective
    stream = cycle(bench.task.selection_data, bench.model.device)
    batches: list[Any] = []

    def next_batches() -> None:
        batches[:] = [next(stream) for _ in range(config.gumbel.batches)]

    def on_iteration(iteration: int, loss: Tensor) -> None:
        done = iteration + 1
        bench.listener.progress("learning", done, config.gumbel.iterations, float(loss))

    try:
        return gumbel.solve(
            trajectory,
            lambda flat: objective.loss_and_gradient(flat, batches),
            K,
            config.gumbel,
            config.seed,
            next_batches,
            on_iteration,
        )
    except ValueError as error:
        raise TaskError(f"learning the mask failed: {error}") from error
