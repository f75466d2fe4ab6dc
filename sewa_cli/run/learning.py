"""Fills a trajectory from files, and has the configured solver choose from it."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.evaluate import cycle
from sewa_cli.report import LeftOut
from sewa_cli.run.bench import Bench, check_budget
from sewa_cli.solvers import Solution, gumbel
from sewa_cli.trajectory import Trajectory


def read_trajectory(bench: Bench, K: int) -> tuple[Trajectory, list[Checkpoint], list[LeftOut]]:
    """Fill W row by row; checkpoints with NaN or Inf are left out, or stop the run."""
    config, total = bench.config, len(bench.checkpoints)
    needed = Trajectory.bytes_needed(total, bench.model.layout)
    trajectory = Trajectory(total, bench.model.layout, _home(needed, bench.model.device))
    used: list[Checkpoint] = []
    left_out: list[LeftOut] = []
    for n, checkpoint in enumerate(bench.checkpoints, 1):
        broken = trajectory.append(bench.floats(checkpoint))
        checkpoint.close()
        if broken is None:
            used.append(checkpoint)
        else:
            reason = f"{broken} holds NaN or Inf"
            if config.nonfinite == "error":
                raise CheckpointError(
                    f"{checkpoint.path}: {reason}; --nonfinite skip leaves it out"
                )
            left_out.append(LeftOut(path=str(checkpoint.path), step=checkpoint.step, reason=reason))
            bench.warn(f"{checkpoint.path}: left out: {reason}")
        bench.listener.progress("reading", n, total)
    if not used:
        raise CheckpointError(f"all {total} checkpoints hold NaN or Inf; none is left")
    check_budget(K, used)
    return trajectory, used, left_out


def _home(needed: int, device: torch.device) -> torch.device:
    """W lives on the device if it fits there with room for the model, else in host memory."""
    if device.type == "cuda" and needed < 0.7 * torch.cuda.mem_get_info(device)[0]:
        return device
    free = psutil.virtual_memory().available
    if needed > 0.9 * free:
        raise ConfigError(
            f"the checkpoints need {needed / 2**30:.1f} GiB of memory as float32 and "
            f"{free / 2**30:.1f} GiB are free; take fewer with --last or --every"
        )
    return torch.device("mps") if device.type == "mps" else torch.device("cpu")


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
