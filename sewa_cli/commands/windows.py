"""`sewa compare --windows`: the comparison in windows that move along the run.

A window is a comparison over a slice of the checkpoints; `last` in it is where training stood.
Model, task and data are set up once; of the checkpoints, one window at a time is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.commands.compare import comparing
from sewa_cli.comparison.evaluator import Evaluator
from sewa_cli.comparison.milestones import LAST, Measure, find_reaches, level_of, mark_best
from sewa_cli.comparison.table import check_budgets, far_off, make_drafts, parse_asked
from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import Call, parse_one
from sewa_cli.output.destination import check_outputs, outputs_at, write_results
from sewa_cli.report.compare import Row
from sewa_cli.report.shared import LeftOut, Placement
from sewa_cli.report.windows import Window, Windows
from sewa_cli.rng import seeded
from sewa_cli.session.cost import Clock
from sewa_cli.session.heading import heading
from sewa_cli.session.session import Run, Session, check_budget, open_session
from sewa_cli.task import Task


class _TooFewLeft(CheckpointError):
    """So many checkpoints of a window are broken that its methods cannot be asked."""


@dataclass(frozen=True)
class _Seen:
    """One window, evaluated; nothing in it holds on to W."""

    where: slice
    used: list[Checkpoint]
    rows: list[Row]
    placement: Placement
    selection_rows: int
    heldout_rows: int | None
    batchnorm: str | None
    averages: int
    far_off: bool


def run_windows(
    config: Config,
    task: Task,
    events: Events | None = None,
    *,
    report: Path | None = None,
    force: bool = False,
    protected: Sequence[Path] = (),
) -> Windows:
    """Every method in every window, and when each reaches the last checkpoint's level."""
    with seeded(config.seed):
        return _run(config, task, events or Events(), report, force, protected)


def _run(
    config: Config,
    task: Task,
    events: Events,
    report_path: Path | None,
    force: bool,
    protected: Sequence[Path],
) -> Windows:
    clock = Clock()
    calls, budgets = parse_asked(config, events)
    if all(call.label != LAST for call in calls):
        calls.append(parse_one(LAST))
    size = config.compare.windows
    if size is None:
        raise ConfigError("windows: how many checkpoints a window? --windows 100")
    stride = config.compare.stride or size
    session = open_session(config, task, events)
    check_budget(0, session.checkpoints)
    checkpoints = session.checkpoints
    check_budgets(calls, budgets, size, "checkpoints in a window")
    slices = place_windows(len(checkpoints), size, stride)
    if not slices:
        raise ConfigError(
            f"windows: {size} checkpoints in a window, but only {len(checkpoints)} take part"
        )
    outputs = outputs_at(config, None, report_path, force, checkpoints[-1], events.command)
    check_outputs(outputs, [*session.inputs, *protected])
    if len(slices) == 1:
        events.warn(
            f"there is only one window: {size} of {len(checkpoints)} checkpoints; nothing can be "
            "said about training it saves"
        )
    if task.heldout_data is None:
        events.warn(
            "no held-out data: windows are judged by selection losses, which flatter the methods "
            "that minimise them"
        )
    seen: list[_Seen] = []
    left_out: dict[str, LeftOut] = {}
    for n, window in enumerate(reversed(slices), 1):  # a broken loss shows in the first
        run = comparing(replace(session, checkpoints=checkpoints[window]))
        evaluate = partial(_evaluate, run, window, calls, budgets, clock)
        try:
            seen.insert(0, run.retry(evaluate))
        except _TooFewLeft as error:
            if n == 1:
                raise error.__cause__ or error from None
            events.warn(f"a window is left out: {error}")
        left_out |= {out.path: out for out in run.rows.left_out}
        if n == 1 and all(row.selection_loss is None for row in seen[0].rows):
            raise TaskError(
                "loss() is NaN or Inf on the selection data for every average of the last window"
            )
        events.progress("windows", n, len(slices))
    if far := sum(one.far_off for one in seen):
        events.warn(
            f"in {far} of {len(seen)} windows a predicted loss is off by more than half of what "
            "the method gained over the mean of all; run it without --fast"
        )
    session.warn_of_overlap(training=session.objective.batch_statistics)
    report = partial(_report, session, clock, size, stride, seen, left_out)
    return write_results(None, outputs, report)


def place_windows(k: int, size: int, stride: int) -> list[slice]:
    """Oldest first. The last ends at k; what is left over is at the beginning of the run."""
    ends = range(k, size - 1, -stride)
    return [slice(end - size, end) for end in reversed(ends)]


def _evaluate(
    run: Run, window: slice, calls: Sequence[Call], budgets: Sequence[int], clock: Clock
) -> _Seen:
    """A comparison over one window. What the model holds afterwards is of no importance."""
    checkpoints = run.session.checkpoints
    between = f"between {checkpoints[0].path} and {checkpoints[-1].path}"
    try:
        with clock("read"):
            run.read()
            check_budget(0, run.used)
    except CheckpointError as error:
        if len(run.rows.left_out) == len(checkpoints):
            raise _TooFewLeft(f"{error} {between}") from error
        raise
    try:
        check_budgets(calls, budgets, run.trajectory.k, f"whole checkpoints {between}")
    except ConfigError as error:
        raise _TooFewLeft(str(error)) from error
    evaluator = Evaluator(run)
    with clock("evaluate"):
        drafts = make_drafts(evaluator, calls, budgets)
        is_off = evaluator.fast and any(True for _ in far_off(evaluator, calls, drafts))
    evaluator.close()
    first = drafts[0].evaluated[0]
    return _Seen(
        where=window,
        used=run.used,
        rows=[draft.row() for draft in drafts],
        placement=run.placed.placement,
        selection_rows=first.selection_rows,
        heldout_rows=first.heldout_rows,
        batchnorm=run.scorer.recomputed_on,
        averages=evaluator.ledger.count("evaluate"),
        far_off=is_off,
    )


def _report(
    session: Session,
    clock: Clock,
    size: int,
    stride: int,
    seen: list[_Seen],
    left_out: dict[str, LeftOut],
) -> Windows:
    checkpoints = session.checkpoints
    whole = {c.path for one in seen for c in one.used}
    used = [c for c in checkpoints if c.path in whole]
    index = {c.path: i for i, c in enumerate(used)}
    has_steps = all(c.step is not None for c in checkpoints)
    place = {c.path: i for i, c in enumerate(checkpoints, 1)}

    def at(checkpoint: Checkpoint) -> int:
        step = checkpoint.step if has_steps else None
        return place[checkpoint.path] if step is None else step

    by: Literal["step", "checkpoint"] = "step" if has_steps else "checkpoint"
    measure: Measure = "heldout_loss" if seen[-1].heldout_rows is not None else "selection_loss"
    windows = [
        Window(
            at=at(one.used[-1]),
            first_step=one.used[0].step,
            last_step=one.used[-1].step,
            candidates=[index[c.path] for c in one.used],
            rows=mark_best(one.rows, measure),
            placement=one.placement,
        )
        for one in seen
    ]
    covered = {i for one in seen for i in range(len(checkpoints))[one.where]}
    task, warnings, device = session.task.source, session.events.warnings, session.model.device
    return Windows(
        **heading(session.config, warnings, task=task, device=device),
        size=size,
        stride=stride,
        parameters=session.model.layout.parameters,
        candidates=session.candidates(used),
        left_out=[left_out[path] for c in checkpoints if (path := str(c.path)) in left_out],
        in_no_window=len(checkpoints) - len(covered),
        selection_rows=seen[-1].selection_rows,
        heldout_rows=seen[-1].heldout_rows,
        by=by,
        windows=windows,
        level=level_of(windows[-1], measure),
        reaches=find_reaches(windows, measure, by),
        batchnorm=seen[-1].batchnorm,
        averages_evaluated=sum(one.averages for one in seen),
        cost=clock.cost(session),
    )
