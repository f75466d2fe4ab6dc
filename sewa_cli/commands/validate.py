"""`sewa validate`: everything that can go wrong early, tried on one batch."""

from __future__ import annotations

from math import isfinite

import torch

from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, TaskError
from sewa_cli.events import Events
from sewa_cli.extensions import chosen_solver
from sewa_cli.objective.overlap import find_overlap
from sewa_cli.objective.tree import rows
from sewa_cli.opening import check_budget, check_objective, open_session
from sewa_cli.placing import floats
from sewa_cli.report.kinds import Validation
from sewa_cli.report.shared import heading
from sewa_cli.rng import seeded
from sewa_cli.scoring.jobs import scores_by_parts
from sewa_cli.task import Task
from sewa_cli.text import finite
from sewa_cli.trajectory import fill_row


def run_validate(config: Config, task: Task, events: Events) -> Validation:
    """Do config, task and checkpoints fit together? One batch, forward and back, newest weights."""
    with seeded(config.seed):
        if task.has_loss or config.objective.metric is not None:
            chosen_solver(config)
            check_objective(config, task)
        session = open_session(config, task, events)
        check_budget(config.K, session.checkpoints)
        newest, layout = session.newest, session.model.layout
        # a row of W, so that NaN is found here as `select` would find it
        row = torch.empty(layout.size, device=session.model.device)
        if broken := fill_row(row, floats(session, newest), layout):
            raise CheckpointError(
                f"{newest.path}: {broken} holds NaN or Inf; `select` leaves it out"
            )
        session.load_integers(newest)
        loss, batch, score = None, (), None
        if task.has_loss:
            batch = next(session.objective.batches())
            loss = float(session.objective.gradient(row, [batch])[0])
            session.objective.unit_losses([batch])  # warns of a sum; one label for each example
        if config.objective.metric is not None or not task.has_loss:
            session.model.set(row)
            score = scores_by_parts(task, session.model, config, most=1)(None)
    with events.stage("looking for examples in two sets"):
        sets = task.selection_data, task.heldout_data, task.training_data
        for sentence in find_overlap(*sets, config.seed):
            events.warn(sentence)
    if loss is not None and not isfinite(loss):
        raise TaskError(
            f"loss() is {loss} on the first batch at {newest.path}; check loss() and that batch"
        )
    summed = task.summarize is not None and task.heldout_data is not None
    return Validation(
        **heading(session.config, events, task, session.model.device),
        parameters=session.model.parameters,
        checkpoints=len(session.checkpoints),
        first_step=session.checkpoints[0].step,
        last_step=newest.step,
        tensors=len(newest.tensors),
        dtypes=sorted({info.dtype for info in newest.tensors.values()}),
        batchnorm_layers=len(session.model.batchnorm),
        batch_rows=rows(batch),
        loss=loss,
        score=score and {name: finite(value) for name, value in score.items()},
        heldout_data=task.heldout_data is not None or bool(task.scoring and task.scoring.heldout),
        training_data=task.training_data is not None,
        metrics=task.metrics is not None or summed,
    )
