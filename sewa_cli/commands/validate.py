"""`sewa validate`: everything that can go wrong early, tried on one batch."""

from __future__ import annotations

from math import isfinite

from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, TaskError
from sewa_cli.events import Listener
from sewa_cli.objective.objective import batchnorm_layers, cycle
from sewa_cli.objective.overlap import warn_of_overlap
from sewa_cli.objective.tree import rows
from sewa_cli.report.validate import Validation
from sewa_cli.rng import seeded
from sewa_cli.session.heading import heading
from sewa_cli.session.session import set_up
from sewa_cli.task import Task
from sewa_cli.trajectory import Trajectory


def run_validate(config: Config, task: Task, listener: Listener | None = None) -> Validation:
    """Do config, task and checkpoints fit together? One batch, forward and back, newest weights."""
    with seeded(config.seed):
        bench = set_up(config, task, listener or Listener())
        newest = bench.checkpoints[-1]
        # a row of a trajectory, so that NaN is found here as `select` would find it
        row = Trajectory(1, bench.model.layout, bench.model.device)
        if broken := row.append(bench.floats(newest)):
            raise CheckpointError(
                f"{newest.path}: {broken} holds NaN or Inf; `select` leaves it out"
            )
        bench.load_integers(newest)
        try:
            batch = next(cycle(task.selection_data, bench.model.device))
        except ValueError as error:
            raise TaskError(f"selection_data(): {error}") from error
        loss, _ = bench.objective.loss_and_gradient(row.W[0], [batch])
    warn_of_overlap(bench, training=True)
    if not isfinite(float(loss)):
        raise TaskError(f"loss() is {float(loss)} on the first batch at {newest.path}")
    infos = newest.tensors.values()
    return Validation(
        **heading(config, bench.warnings, task=task.source, device=bench.model.device),
        checkpoints=len(bench.checkpoints),
        first_step=bench.checkpoints[0].step,
        last_step=newest.step,
        tensors=len(newest.tensors),
        parameters=bench.model.layout.parameters,
        dtypes=sorted({info.dtype for info in infos}),
        batchnorm_layers=len(batchnorm_layers(bench.model.module)),
        batch_rows=rows(batch),
        loss=float(loss),
        heldout_data=task.heldout_data is not None,
        training_data=task.training_data is not None,
        metrics=task.metrics is not None,
    )
