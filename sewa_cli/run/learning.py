"""Has the configured solver choose from a trajectory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.evaluate import cycle
from sewa_cli.run.bench import Bench, check_budget
from sewa_cli.run.placing import Placed, place
from sewa_cli.solvers import Solution, gumbel
from sewa_cli.trajectory import Trajectory


def read_trajectory(bench: Bench, K: int) -> Placed:
    """The checkpoints as W, where it fits; those with NaN or Inf are left out, or stop the run."""
    placed = place(bench)
    check_budget(K, placed.used)
    return placed


def learn(bench: Bench, trajectory: Trajectory, K: int) -> Solution:
    """Ask the configured solver for K of the trajectory's checkpoints."""
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
