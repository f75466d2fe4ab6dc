"""`sewa compare`: every method on the same checkpoints, the same data, the same evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sewa_cli import ranks
from sewa_cli.commands.writing import write_average
from sewa_cli.comparison.evaluator import Evaluator
from sewa_cli.comparison.table import Asked, compare_drafts, evaluate_all, far_off
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import Coefficients
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, decide_outputs
from sewa_cli.report.compare import Comparison, Judged, Row
from sewa_cli.rng import seeded
from sewa_cli.session.building import check_objective
from sewa_cli.session.extensions import make_solver
from sewa_cli.session.run import Setup, set_up
from sewa_cli.session.session import Session, check_budget, open_session
from sewa_cli.settings import USUAL
from sewa_cli.solvers import WEIGHING, default_for
from sewa_cli.task import Task


def run_compare(
    config: Config,
    task: Task,
    events: Events | None = None,
    *,
    output_best: Path | None = None,
    report: Path | None = None,
    force: bool = False,
    protected: Sequence[Path] = (),
) -> Comparison:
    """Evaluate every method at every K, and say which differences are real."""
    events = events or Events()
    with seeded(config.seed), ExitStack() as stack:
        check_objective(config, task)
        asked = Asked.by(config, events, has_loss=task.has_loss)
        by_metric = config.objective.metric is not None
        if output_best is not None and task.heldout_data is None and not by_metric:
            raise ConfigError(
                "--output-best needs held-out data to tell which is best: define heldout_data in "
                f"{task.source}"
            )
        session = open_session(config, task, events)
        check_budget(0, session.checkpoints)
        asked = asked.of(len(session.checkpoints))
        outputs = Outputs(None)
        if ranks.here().rank == 0:
            outputs = Outputs(None, report, force=force)
            if output_best is not None:
                named = config.model_copy(update={"output": str(output_best), "report": report})
                outputs = decide_outputs(named, force, None, session.newest)
            outputs = outputs.check([*session.inputs, *protected])
        outputs = outputs.shared()
        if not by_metric:
            session.warn_of_overlap(training=session.objective.batch_statistics)
        setup = comparing(session)
        evaluator, drafts = setup.placer.retry(lambda: evaluate_all(setup, asked))
        stack.callback(evaluator.close)
        every = [one for draft in drafts for one in draft.evaluated]
        judged = _judged(evaluator)
        if judged is None and all(one.scores.selection_loss is None for one in every):
            raise TaskError("loss() is NaN or Inf on the selection data for every average")
        samples = config.compare.bootstrap
        table = compare_drafts(drafts, config.seed, samples, events, judged)
        for text in far_off(evaluator, asked, drafts) if evaluator.fast else ():
            events.warn(text)
        if judged is None and task.heldout_data is None:
            events.warn(
                "no held-out data: no held-out loss, interval, tie or winner can be reported, and "
                "selection losses flatter the methods that minimise them"
            )
        average = None
        if output_best is not None and table.best is not None:
            average = _best(evaluator, table.rows[table.best]).as_written(outputs.form)
        recipe = average.recipe(outputs.shard_size) if average is not None else None

        def make_report() -> Comparison:
            return Comparison(
                **evaluator.run.report(),
                selection_rows=every[0].selection_rows,
                heldout_rows=every[0].heldout_rows,
                selection_groups=session.objective.count_groups(session.objective.selection),
                heldout_groups=every[0].heldout_groups,
                unit=table.unit,
                rows=table.rows,
                judged=table.judged,
                best=table.best,
                winner=table.winner,
                batchnorm=setup.scorer.recomputed_on,
                averages_evaluated=evaluator.ledger.count("evaluate"),
                output=outputs.named if average is not None else None,
                recipe=recipe,
            )

        return write_average(average, outputs, make_report, session.events)[0]


def _judged(evaluator: Evaluator) -> Judged | None:
    metric = evaluator.metric
    if metric is None:
        return None
    return Judged(metric=metric.name, goal=metric.goal, parts=metric.heldout_parts or 0)


def comparing(session: Session) -> Setup:
    """W is held for all methods; where outputs are kept too, both share the memory there is."""
    config = session.config
    solver = make_solver(config, config.solver or default_for(USUAL, sparse=False))
    if not solver.takes_k or "parts" in solver.needs:  # it has a row of its own; masks are usual
        solver = make_solver(config, default_for(USUAL, sparse=False))
    caches = config.compare.fast or "outputs" in solver.needs or WEIGHING in config.compare.methods
    return set_up(session, solver, share=0.5 if caches else 1.0, stream=False)


def _best(evaluator: Evaluator, row: Row) -> Average:
    """The best row as a file; of several draws, the one with the lowest selection loss.

    By a metric none is known to choose them by: to take the best held out would make that flatter.
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
