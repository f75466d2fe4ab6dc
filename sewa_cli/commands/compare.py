"""`sewa compare`: every method on the same checkpoints, the same data, the same evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.comparison.evaluator import Court
from sewa_cli.comparison.table import Draft, check_budgets, far_off, make_drafts, parse_asked
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.events import Listener
from sewa_cli.methods import Coefficients
from sewa_cli.objective.intervals import FEWEST, Spread, compare_rows
from sewa_cli.objective.objective import UnitLosses
from sewa_cli.objective.overlap import warn_of_overlap
from sewa_cli.output.average import Averaged
from sewa_cli.output.destination import check_outputs, outputs_at, write_results
from sewa_cli.output.layouts import as_written
from sewa_cli.output.lora import average_factors
from sewa_cli.output.lora import warning as lora_warning
from sewa_cli.report.compare import Comparison, Row
from sewa_cli.report.shared import Candidate, Interval
from sewa_cli.rng import seeded
from sewa_cli.session.cost import Clock, metadata_of, total_cost
from sewa_cli.session.heading import heading
from sewa_cli.session.session import Bench, set_up
from sewa_cli.solvers.learning import read_trajectory
from sewa_cli.task import Task
from sewa_cli.trajectory.placement import Placed, despite_memory


def run_compare(
    config: Config,
    task: Task,
    listener: Listener | None = None,
    *,
    output_best: Path | None = None,
    report: Path | None = None,
    force: bool = False,
    protected: Sequence[Path] = (),
) -> Comparison:
    """Judge every method at every K, and say which differences are real."""
    with seeded(config.seed):
        return _compare(config, task, listener or Listener(), output_best, report, force, protected)


def _compare(
    config: Config,
    task: Task,
    listener: Listener,
    output_best: Path | None,
    report_path: Path | None,
    force: bool,
    protected: Sequence[Path],
) -> Comparison:
    clock = Clock()
    calls, budgets = parse_asked(config, listener)
    if output_best is not None and task.heldout_data is None:
        raise ConfigError(
            f"--output-best needs held-out data to tell which is best: define heldout_data in "
            f"{task.source}"
        )
    bench = set_up(config, task, listener, 0)
    check_budgets(calls, budgets, len(bench.checkpoints))
    newest, command = bench.checkpoints[-1], listener.command
    outputs = outputs_at(config, output_best, report_path, force, newest, command)
    check_outputs(outputs, [*bench.inputs, *protected])

    def judge_all() -> tuple[Placed, Court, list[Draft]]:
        with clock("read"):
            caches = config.compare.fast or config.solver == "linear"
            placed = read_trajectory(bench, 0, share=0.5 if caches else 1.0)
            check_budgets(calls, budgets, len(placed.used))
        court = Court(bench, placed)
        with clock("evaluate"):
            return placed, court, make_drafts(court, calls, budgets, listener)

    placed, court, drafts = despite_memory(bench, judge_all)
    used = placed.used
    if all(judged.selection_loss is None for draft in drafts for judged in draft.judged):
        raise TaskError("loss() is NaN or Inf on the selection data for every average")
    rows, best, unit = _rows(drafts, bench, config)
    if court.fast:
        for text in far_off(court, calls, drafts):
            bench.warn(text)
    warn_of_overlap(bench, training=bench.objective.batch_statistics)
    if task.heldout_data is None:
        bench.warn(
            "no held-out data: no held-out loss, interval, tie or winner can be reported, and "
            "selection losses flatter the methods that minimise them"
        )
    averaged = None
    if output_best is not None and best is not None:
        averaged = _winner(court, bench, used, rows[best], config)
        if len(rows[best].coefficients) > 1:
            bench.warn(
                f"{rows[best].method} is a mean over draws; the draw with the lowest selection "
                "loss is written"
            )
        averaged.metadata = metadata_of(averaged, rows[best].method, rows[best].K)
        if apart := lora_warning(average_factors(averaged, "factors")):
            bench.warn(apart)
        averaged = as_written(averaged, outputs.form)
    recipe = averaged.recipe() if averaged is not None else None

    def make_report() -> Comparison:
        return Comparison(
            **heading(config, bench.warnings, task=task.source, device=bench.model.device),
            k=len(used),
            parameters=bench.model.layout.parameters,
            candidates=[
                Candidate(index=i, path=str(c.path), step=c.step, logged=c.metrics or None)
                for i, c in enumerate(used)
            ],
            left_out=placed.left_out,
            placement=placed.placement,
            selection_rows=court.scales.selection_rows,
            heldout_rows=court.scales.heldout_rows,
            unit=unit,
            rows=rows,
            best=best,
            winner=_sole_winner(rows, best),
            batchnorm=court.scales.recomputed_on,
            averages_evaluated=court.ledger.count("judge"),
            cost=total_cost(bench, clock),
            output=str(output_best) if averaged is not None else None,
            recipe=recipe,
        )

    return write_results(averaged, outputs, make_report)


def _rows(
    drafts: Sequence[Draft], bench: Bench, config: Config
) -> tuple[list[Row], int | None, Any]:
    """Compare the drafts with each other; returns rows, the best one's index, the unit."""
    heldout = [[j.heldout for j in draft.judged if j.heldout is not None] for draft in drafts]
    finite_rows = [i for i, units in enumerate(heldout) if units and _all_finite(units)]
    spread: Spread | None = None
    unit: Literal["rows", "batches"] | None = None
    if finite_rows:
        every = [u for i in finite_rows for u in heldout[i]]
        unit = "rows" if all(u.rows is not None for u in every) else "batches"
        # a draw more or less is no other example: a row's loss on one is its mean over the draws
        matrix = torch.stack([_mean_units(heldout[i], unit) for i in finite_rows])
        counts = every[0].counts if unit == "batches" else torch.ones_like(matrix[0])
        if unit == "batches":
            bench.warn("the loss does not split into rows, so whole batches are resampled")
        if len(counts) >= FEWEST:
            spread = compare_rows(matrix, counts, config.seed, config.compare.bootstrap)
        else:
            bench.warn(
                f"{len(counts)} held-out {unit} are too few for intervals; {FEWEST} are the least"
            )
    at = {row: position for position, row in enumerate(finite_rows)}
    best = finite_rows[spread.best] if spread is not None else None
    rows = [_row(draft, at.get(i), spread, i == best) for i, draft in enumerate(drafts)]
    if (
        best is None and finite_rows
    ):  # no intervals: the lowest is known, but nothing about its lead
        best = min(finite_rows, key=lambda i: rows[i].heldout_loss or 0.0)
    return rows, best, unit


def _all_finite(units: Sequence[UnitLosses]) -> bool:
    return all(bool(torch.isfinite(u.batches).all()) for u in units)


def _mean_units(units: Sequence[UnitLosses], unit: str) -> Tensor:
    losses = [u.batches if unit == "batches" or u.rows is None else u.rows for u in units]
    return torch.stack(losses).mean(0)


def _row(draft: Draft, position: int | None, spread: Spread | None, is_best: bool) -> Row:
    row = draft.row()
    if spread is None or position is None:
        return row if spread is None else row.model_copy(update={"mark": "worse"})
    low, high = spread.difference_intervals[position]
    own_low, own_high = spread.intervals[position]
    return row.model_copy(
        update={
            "interval": Interval(low=own_low, high=own_high),
            "difference": spread.differences[position],
            "difference_interval": Interval(low=low, high=high),
            "mark": "best" if is_best else "tie" if low <= 0 else "worse",
        }
    )


def _sole_winner(rows: Sequence[Row], best: int | None) -> str | None:
    """The best row's name, if what ties with it is the very same average."""
    if best is None or rows[best].mark != "best":
        return None
    ties = [row for row in rows if row.mark == "tie"]
    rivals = [row for row in rows if not _same_average(row, rows[best])]
    same = bool(rivals) and all(_same_average(row, rows[best]) for row in ties)
    K = rows[best].K
    return (rows[best].method + (f" K={K}" if K is not None else "")) if same else None


def _same_average(one: Row, two: Row) -> bool:
    flat = [[round(c, 12) for draw in row.coefficients for c in draw] for row in (one, two)]
    return flat[0] == flat[1]


def _winner(
    court: Court, bench: Bench, used: Sequence[Checkpoint], row: Row, config: Config
) -> Averaged:
    """The best row as a file; of several draws, the one with the lowest selection loss."""

    def loss(draw: Coefficients) -> float:
        found = court.judge(draw).selection_loss
        return float("inf") if found is None else found

    coefficients = min(row.coefficients, key=loss)
    chosen = [i for i, c in enumerate(coefficients) if c != 0]
    return Averaged(
        sources=[used[i] for i in chosen],
        coefficients=[coefficients[i] for i in chosen],
        names=bench.names,
        dtype=config.output_dtype,
        state_key=config.state_key,
        replaced=court.judge(coefficients).statistics,
    )
