"""`sewa evaluate`: losses and metrics of any files, one by one, as they are."""

from __future__ import annotations

from sewa_cli import ranks
from sewa_cli.candidates import open_named
from sewa_cli.checkpoints import check_tied, match_names
from sewa_cli.checkpoints.means import choose, with_running
from sewa_cli.config import Config
from sewa_cli.events import Events
from sewa_cli.opening import build_objective, check_objective, with_whole_batches
from sewa_cli.remote.streamed import settle
from sewa_cli.report.kinds import Evaluated, Evaluation
from sewa_cli.report.shared import heading
from sewa_cli.rng import seeded
from sewa_cli.scores import Scorer
from sewa_cli.scoring.jobs import scores_by_parts
from sewa_cli.task import Task


def run_evaluate(config: Config, task: Task, events: Events) -> Evaluation:
    """In the order given. Files need not agree with each other, only with the model."""
    here = ranks.here()
    task = with_whole_batches(task, here)
    if config.objective.metric is not None:
        check_objective(config, task)
    with seeded(config.seed):
        checkpoints = open_named(config, events, keep_ours=True)
        if config.source:
            checkpoints, _ = choose(with_running(checkpoints), config.source, events.say)
        checkpoints = settle(checkpoints)
        objective = build_objective(config, task, checkpoints, events, here)
        model = objective.model
        metrics = task.metrics
        if task.scoring and (config.objective.metric or not (metrics or task.has_loss)):
            metrics = scores_by_parts(task, model, config)
        scorer = Scorer(objective, task.heldout_data, metrics=metrics)
        fits = []
        for checkpoint in checkpoints:  # all of them, before the first is evaluated
            names = match_names(checkpoint, model.aliases, model.shapes, model.layout.slices)
            check_tied(checkpoint, model.aliases)
            fits.append(names)
        files = []
        files_and_names = list(zip(checkpoints, fits, strict=True))
        for checkpoint, names in events.over("evaluating", files_and_names, len(checkpoints)):
            model.load((n, checkpoint.read(source, model.part(n))) for n, source in names.items())
            found = scorer.score()
            path, step = checkpoint.name, checkpoint.step
            files.append(Evaluated(path=path, step=step, **dict(found.scores)))
            checkpoint.close()
    return Evaluation(
        **heading(config, events, task, model.device),
        files=files,
        selection_rows=found.selection_rows,
        heldout_rows=found.heldout_rows,
    )
