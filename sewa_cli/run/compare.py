"""`sewa compare`: every method on the same checkpoints, the same data, the same evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sewa_cli.bootstrap import FEWEST, Spread, compare_rows
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import AUTO, Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.evaluate import UnitLosses
from sewa_cli.methods import Call, Coefficients, mean_of
from sewa_cli.report import (
    Candidate,
    Comparison,
    Interval,
    Row,
    RowCost,
)
from sewa_cli.run.accounts import Clock, metadata_of, total_cost, versions
from sewa_cli.run.bench import Bench, seeded, set_up
from sewa_cli.run.court import Court, Judged, Meter
from sewa_cli.run.fitting import as_written
from sewa_cli.run.learning import read_trajectory
from sewa_cli.run.listener import Listener
from sewa_cli.run.lora import average_factors
from sewa_cli.run.lora import warning as lora_warning
from sewa_cli.run.outputs import check_outputs, outputs_at, write_results
from sewa_cli.run.proposing import parse_methods, propose, register_methods
from sewa_cli.run.recipe import Averaged
from sewa_cli.run.scales import finite
from sewa_cli.task import Task

SMALL = 0.01  # of the loss: an error that nobody would act on


@dataclass(frozen=True)
class _Draft:
    """A row before the rows are compared with each other."""

    label: str
    K: int | None
    draws: list[Coefficients]
    judged: list[Judged]
    cost: Meter
    predicted: float | None = None  # by the cache
    surrogate_error: float | None = None  # that, minus the true loss as it was mixed


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
    register_methods(config, listener)
    if config.lora == "merged":
        raise ConfigError("lora: compare averages A and B apart; `select` and `average` can merge")
    calls = parse_methods(config.compare.methods)
    budgets = sorted(set(config.compare.K or (config.K,)))
    if AUTO in budgets and any(call.method.has_budget for call in calls):
        raise ConfigError("K: auto is for `sewa select`; name the K to compare: --K 5,10,20")
    if output_best is not None and task.heldout_data is None:
        raise ConfigError(
            f"--output-best needs held-out data to tell which is best: define heldout_data in "
            f"{task.source}"
        )
    bench = set_up(config, task, listener, 0)
    _check_budgets(calls, budgets, len(bench.checkpoints))
    newest, command = bench.checkpoints[-1], listener.command
    outputs = outputs_at(config, output_best, report_path, force, newest, command)
    check_outputs(outputs, [*bench.inputs, *protected])
    with clock("read"):
        caches = config.compare.fast or config.solver == "linear"
        placed = read_trajectory(bench, 0, share=0.5 if caches else 1.0)
        _check_budgets(calls, budgets, len(placed.used))
        trajectory, used = placed.trajectory, placed.used
    court = Court(bench, placed)
    with clock("evaluate"):
        drafts = _drafts(court, calls, budgets, listener)
    if all(judged.selection_loss is None for draft in drafts for judged in draft.judged):
        raise TaskError("loss() is NaN or Inf on the selection data for every average")
    rows, best, unit = _rows(drafts, bench, config)
    if court.fast:
        _warn_of_errors(bench, calls, drafts, court)
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
            versions=versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=config.model_dump(mode="json"),
            task=task.source,
            device=str(bench.model.device),
            seed=config.seed,
            k=trajectory.k,
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
            warnings=bench.warnings,
        )

    return write_results(averaged, outputs, make_report)


def _check_budgets(calls: Sequence[Call], budgets: Sequence[int], k: int) -> None:
    """`sewa` must have something to choose; the others can take all there are."""
    for call in calls:
        most = k - 1 if call.method.name == "sewa" else k
        if call.method.has_budget and max(budgets) > most:
            raise ConfigError(
                f"K: {max(budgets)} of {k} checkpoints is too many for {call.label}; K must be at "
                f"most {most}"
            )


def _drafts(
    court: Court, calls: Sequence[Call], budgets: Sequence[int], listener: Listener
) -> list[_Draft]:
    asked = [(call, K) for call in calls for K in (budgets if call.method.has_budget else [None])]
    drafts = []
    for n, (call, K) in enumerate(asked, 1):
        court.begin_row()
        with seeded(court.run.seed):
            draws = propose(call, court.run, K)
        judged = [court.judge(coefficients) for coefficients in draws]
        cost = court.ledger.next_row()
        predicted = error = None
        if court.fast:
            predicted = _mean([court.predicted_loss(c) for c in draws])
            true = _mean([court.cached_loss(c) for c in draws])
            error = None if predicted is None or true is None else predicted - true
            court.ledger.next_row()  # our own curiosity is not the method's cost
        drafts.append(_Draft(call.label, K, draws, judged, cost, predicted, error))
        listener.progress("comparing", n, len(asked))
    return drafts


def _warn_of_errors(
    bench: Bench, calls: Sequence[Call], drafts: Sequence[_Draft], court: Court
) -> None:
    """Where a prediction is off by more than half of what the method has gained by it."""
    searching = {call.label for call in calls if call.method.needs_loss}
    uniform = court.selection_loss(mean_of(range(court.run.k), court.run.k))
    for draft in drafts:
        error, predicted = draft.surrogate_error, draft.predicted
        if draft.label not in searching or error is None or predicted is None:
            continue
        gained = uniform - (predicted - error)
        if abs(error) > max(abs(gained) / 2, SMALL * abs(uniform)):
            name = draft.label + (f" K={draft.K}" if draft.K is not None else "")
            bench.warn(
                f"{name}: its predicted loss is off by {error:.3g}, and it gained {gained:.3g} "
                "over the mean of all; run it without --fast"
            )


def _rows(
    drafts: Sequence[_Draft], bench: Bench, config: Config
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
    rows = [_row(draft, heldout[i], at.get(i), spread, i == best) for i, draft in enumerate(drafts)]
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


def _row(
    draft: _Draft,
    heldout: Sequence[UnitLosses],
    position: int | None,
    spread: Spread | None,
    is_best: bool,
) -> Row:
    losses = [units.mean for units in heldout]
    interval = difference = difference_interval = None
    mark: Any = None
    if spread is not None:
        mark = "worse"
        if position is not None:
            low, high = spread.intervals[position]
            interval = Interval(low=low, high=high)
            difference = spread.differences[position]
            low, high = spread.difference_intervals[position]
            difference_interval = Interval(low=low, high=high)
            mark = "best" if is_best else "tie" if low <= 0 else "worse"
    return Row(
        method=draft.label,
        K=draft.K,
        size=max(sum(c != 0 for c in coefficients) for coefficients in draft.draws),
        coefficients=draft.draws,
        selection_loss=_mean([j.selection_loss for j in draft.judged]),
        predicted_loss=draft.predicted,
        surrogate_error=draft.surrogate_error,
        heldout_loss=_mean(list(losses)) if losses else None,
        interval=interval,
        spread=finite(float(torch.tensor(losses).std())) if len(losses) > 1 else None,
        difference=difference,
        difference_interval=difference_interval,
        mark=mark,
        metrics=_mean_metrics([j.metrics for j in draft.judged]),
        cost=RowCost(
            forward_passes=draft.cost.forward,
            backward_passes=draft.cost.backward,
            bytes_read=draft.cost.bytes,
            seconds=draft.cost.seconds,
        ),
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


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite(sum(known) / len(known)) if len(known) == len(values) and known else None


def _mean_metrics(
    metrics: Sequence[dict[str, float | None] | None],
) -> dict[str, float | None] | None:
    if not metrics or metrics[0] is None:
        return None
    names = dict.fromkeys(name for found in metrics for name in found or {})
    return {name: _mean([(found or {}).get(name) for found in metrics]) for name in names}
