"""`sewa compare`: every method on the same checkpoints, the same data, the same evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from sewa_cli.commands import make_card
from sewa_cli.comparison.evaluator import Evaluator
from sewa_cli.comparison.table import (
    ComparedRows,
    ComparisonPlan,
    Draft,
    compare_drafts,
    evaluate_all,
    far_off,
)
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.extensions import make_solver
from sewa_cli.methods import Coefficients
from sewa_cli.opening import Session, check_budget, check_objective, open_session
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, decide_outputs, settle_outputs, write_results
from sewa_cli.placing import Setup, set_up
from sewa_cli.report.kinds import ComparedRow, Comparison, Judged
from sewa_cli.rng import seeded
from sewa_cli.settings import USUAL
from sewa_cli.solvers import WEIGHING, Solver, default_for
from sewa_cli.task import Task


def run_compare(
    config: Config,
    task: Task,
    events: Events,
    *,
    output_best: Path | None = None,
    report: Path | None = None,
    force: bool = False,
    protected: Sequence[Path] = (),
) -> Comparison:
    """Evaluate every method at every K, and say which differences are real."""
    with seeded(config.seed), ExitStack() as stack:
        setup, asked = _open(config, task, events, with_output=output_best is not None)
        session = setup.session
        decide = partial(_decide, session, output_best, report, force)
        outputs = settle_outputs(decide, [*session.inputs, *protected])
        evaluator, drafts = setup.placer.retry(lambda: evaluate_all(setup, asked))
        stack.callback(evaluator.close)
        table = _judge(evaluator, asked, drafts)
        average, objective = None, evaluator.run.session.objective
        if output_best is not None and table.best is not None:
            average = _best(evaluator, table.rows[table.best]).as_written(outputs.form)
        recipe = average.recipe(outputs.shard_size) if average is not None else None
        scored = drafts[0].evaluated[0]

        def make_report() -> Comparison:
            return Comparison(
                **evaluator.run.report(),
                selection_rows=scored.selection_rows,
                heldout_rows=scored.heldout_rows,
                selection_groups=objective.count_groups(objective.selection),
                heldout_groups=scored.heldout_groups,
                unit=table.unit,
                rows=table.rows,
                judged=table.judged,
                best=table.best,
                verdict=table.verdict,
                winner=table.winner,
                batchnorm=session.scorer.recomputed_on,
                averages_evaluated=evaluator.scores.count("evaluate"),
                output=outputs.named if average is not None else None,
                recipe=recipe,
            )

        return write_results(average, outputs, make_report, make_card, events)[0]


def _open(
    config: Config, task: Task, events: Events, *, with_output: bool
) -> tuple[Setup, ComparisonPlan]:
    """Open everything, and refuse now what could not be compared or written in the end."""
    check_objective(config, task)
    asked = ComparisonPlan.by(config, events, has_loss=task.has_loss)
    if with_output and task.heldout_data is None and config.objective.metric is None:
        raise ConfigError(
            "--output-best needs held-out data to tell which is best: define heldout_data in "
            f"{task.source}"
        )
    session = open_session(config, task, events)
    check_budget(0, session.checkpoints)
    learner = _learner(config)
    # W is held for all methods; where outputs are kept too, both share the memory
    keeps_outputs = "outputs" in learner.needs or WEIGHING in config.compare.methods
    share = 0.5 if config.compare.fast or keeps_outputs else 1.0
    setup = set_up(session, learner, share=share, stream=False)
    return setup, asked.of(len(session.checkpoints))


def _learner(config: Config) -> Solver:
    """Return the solver of the method `sewa`: the configured one, if it makes masks by the loss."""
    usual = default_for(USUAL, sparse=False)
    solver = make_solver(config, config.solver or usual)
    is_other = not solver.takes_k or "parts" in solver.needs  # which has a row of its own
    return make_solver(config, usual) if is_other else solver


def _decide(
    session: Session, output_best: Path | None, report: Path | None, force: bool
) -> Outputs:
    if output_best is None:
        return Outputs(None, report, force=force)
    update = {"output": str(output_best), "report": report}
    return decide_outputs(session.config.model_copy(update=update), force, None, session.newest)


def _judge(evaluator: Evaluator, asked: ComparisonPlan, drafts: Sequence[Draft]) -> ComparedRows:
    """Compare the rows, and warn of what limits the comparison."""
    session, metric = evaluator.run.session, evaluator.metric
    config, events = session.config, session.events
    judged = None
    if metric is not None:
        name, goal = metric.criterion.name, metric.criterion.goal
        judged = Judged(metric=name, goal=goal, parts=metric.heldout_parts or 0)
    else:
        losses = [one.scores.selection_loss for draft in drafts for one in draft.evaluated]
        if all(loss is None for loss in losses):
            raise TaskError("loss() is NaN or Inf for every average; check it with `sewa validate`")
    table = compare_drafts(drafts, config.seed, config.compare.bootstrap, events, judged)
    for text in far_off(evaluator, asked, drafts) if evaluator.survey else ():
        events.warn(text)
    if metric is None and session.task.heldout_data is None:
        events.warn(
            "no held-out data: no held-out loss, interval, tie or winner can be reported, and "
            "selection losses flatter the methods that minimise them"
        )
    return table


def _best(evaluator: Evaluator, row: ComparedRow) -> Average:
    """Return the best row as a file; of several draws, the one with the lowest selection loss.

    By a metric it is the first draw: choosing by held-out scores would flatter them.
    """

    def loss(draw: Coefficients) -> float:
        found = evaluator.evaluate(draw).scores.selection_loss
        return float("inf") if found is None else found

    by_metric = evaluator.metric is not None
    coefficients = row.coefficients[0] if by_metric else min(row.coefficients, key=loss)
    if len(row.coefficients) > 1:
        which = "first draw" if by_metric else "draw with the lowest selection loss"
        evaluator.run.session.events.warn(
            f"{row.method} is a mean over draws; the {which} is written"
        )
    average = evaluator.run.average(coefficients, row.method, row.K)
    return average.with_statistics(evaluator.statistics(coefficients))
