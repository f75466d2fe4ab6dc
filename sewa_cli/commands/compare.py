"""`sewa compare`: every method on the same checkpoints, the same data, the same evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sewa_cli.comparison.evaluator import Evaluator
from sewa_cli.comparison.table import (
    Draft,
    check_budgets,
    compare_drafts,
    far_off,
    make_drafts,
    parse_asked,
)
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import Coefficients
from sewa_cli.output.average import Average
from sewa_cli.output.destination import check_outputs, outputs_at, write_results
from sewa_cli.output.lora import warning as lora_warning
from sewa_cli.report.compare import Comparison, Row
from sewa_cli.rng import seeded
from sewa_cli.session.cost import Clock
from sewa_cli.session.extensions import make_solver
from sewa_cli.session.heading import heading
from sewa_cli.session.session import Run, Session, check_budget, open_session
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
    with seeded(config.seed):
        return _compare(config, task, events or Events(), output_best, report, force, protected)


def _compare(
    config: Config,
    task: Task,
    events: Events,
    output_best: Path | None,
    report_path: Path | None,
    force: bool,
    protected: Sequence[Path],
) -> Comparison:
    clock = Clock()
    calls, budgets = parse_asked(config, events)
    if output_best is not None and task.heldout_data is None:
        raise ConfigError(
            "--output-best needs held-out data to tell which is best: define heldout_data in "
            f"{task.source}"
        )
    session = open_session(config, task, events)
    check_budget(0, session.checkpoints)
    check_budgets(calls, budgets, len(session.checkpoints))
    newest, command = session.newest, events.command
    outputs = outputs_at(config, output_best, report_path, force, newest, command)
    check_outputs(outputs, [*session.inputs, *protected])
    run = comparing(session)

    def evaluate_all() -> tuple[Evaluator, list[Draft]]:
        with clock("read"):
            run.read()
            check_budget(0, run.used)
            check_budgets(calls, budgets, run.trajectory.k)
        evaluator = Evaluator(run)
        with clock("evaluate"):
            return evaluator, make_drafts(evaluator, calls, budgets)

    evaluator, drafts = run.retry(evaluate_all)
    every = [one for draft in drafts for one in draft.evaluated]
    if all(one.selection_loss is None for one in every):
        raise TaskError("loss() is NaN or Inf on the selection data for every average")
    table = compare_drafts(drafts, config.seed, config.compare.bootstrap, events)
    if evaluator.fast:
        for text in far_off(evaluator, calls, drafts):
            events.warn(text)
    session.warn_of_overlap(training=session.objective.batch_statistics)
    if task.heldout_data is None:
        events.warn(
            "no held-out data: no held-out loss, interval, tie or winner can be reported, and "
            "selection losses flatter the methods that minimise them"
        )
    average = None
    if output_best is not None and table.best is not None:
        average = _best(evaluator, table.rows[table.best]).as_written(outputs.form)
    recipe = average.recipe() if average is not None else None

    def make_report() -> Comparison:
        return Comparison(
            **heading(config, events.warnings, task=task.source, device=session.model.device),
            k=run.trajectory.k,
            parameters=session.model.layout.parameters,
            candidates=session.candidates(run.used),
            left_out=run.rows.left_out,
            placement=run.placed.placement,
            selection_rows=every[0].selection_rows,
            heldout_rows=every[0].heldout_rows,
            unit=table.unit,
            rows=table.rows,
            best=table.best,
            winner=table.winner,
            batchnorm=run.scorer.recomputed_on,
            averages_evaluated=evaluator.ledger.count("evaluate"),
            cost=clock.cost(session),
            output=str(output_best) if average is not None else None,
            recipe=recipe,
        )

    return write_results(average, outputs, make_report)


def comparing(session: Session) -> Run:
    """W is held for all methods; where outputs are kept too, both share the memory there is."""
    solver = make_solver(session.config)
    caches = session.config.compare.fast or "outputs" in solver.needs
    return Run(session, solver, share=0.5 if caches else 1.0, stream=False)


def _best(evaluator: Evaluator, row: Row) -> Average:
    """The best row as a file; of several draws, the one with the lowest selection loss."""
    events = evaluator.run.session.events

    def loss(draw: Coefficients) -> float:
        found = evaluator.evaluate(draw).selection_loss
        return float("inf") if found is None else found

    coefficients = min(row.coefficients, key=loss)
    average = evaluator.run.average(coefficients, row.method, row.K)
    if len(row.coefficients) > 1:
        events.warn(
            f"{row.method} is a mean over draws; the draw with the lowest selection loss is written"
        )
    if text := lora_warning(average.lora):
        events.warn(text)
    return average.with_statistics(evaluator.evaluate(coefficients).statistics)
