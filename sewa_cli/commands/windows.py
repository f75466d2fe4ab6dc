"""`sewa compare --windows`: the comparison in windows that move along the run.

A window is a comparison over a slice of the checkpoints; `last` in it is where training stood.
Model, task and data are set up once; of the checkpoints, one window at a time is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.commands.compare import comparing
from sewa_cli.comparison.milestones import LAST, Measure, find_reaches, level_of, mark_best
from sewa_cli.comparison.table import Asked, TooFew, evaluate_all, far_off
from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Events
from sewa_cli.methods import parse_one
from sewa_cli.objective.scorer import Scored
from sewa_cli.output.destination import outputs_at, write_results
from sewa_cli.report.compare import Row
from sewa_cli.report.shared import LeftOut, Placement
from sewa_cli.report.windows import Window, Windows
from sewa_cli.rng import seeded
from sewa_cli.session.building import check_objective
from sewa_cli.session.session import Run, Session, check_budget, open_session
from sewa_cli.task import Task


@dataclass(frozen=True)
class _Seen:
    """One window, evaluated; nothing in it holds on to W."""

    where: slice
    used: list[Checkpoint]
    rows: list[Row]
    placement: Placement
    first: Scored  # one of its averages, for the numbers of rows
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
    events = events or Events()
    with seeded(config.seed):
        asked = Asked.by(config, events)
        if all(call.label != LAST for call in asked.calls):
            asked.calls.append(parse_one(LAST))
        size = config.compare.windows
        if size is None:
            raise ConfigError("windows: say how many checkpoints a window has: --windows 100")
        check_objective(config, task)
        session = open_session(config, task, events)
        check_budget(0, session.checkpoints)
        asked = asked.of(size, "checkpoints in a window")
        k, stride = len(session.checkpoints), config.compare.stride or size
        slices = place_windows(k, size, stride)
        if not slices:
            raise ConfigError(f"windows: {size} checkpoints in a window, but only {k} take part")
        outputs = outputs_at(config, None, report, force, session.newest, events.command)
        outputs = outputs.check([*session.inputs, *protected], session.events.show_warning)
        if len(slices) == 1:
            events.warn(
                f"there is only one window: {size} of {k} checkpoints; nothing can be said about "
                "the training it saves"
            )
        if task.heldout_data is None:
            events.warn(
                "no held-out data: windows are judged by selection losses, which flatter the "
                "methods that minimise them"
            )
        seen, left_out = _evaluate_windows(session, asked, slices)
        if far := sum(one.far_off for one in seen):
            events.warn(
                f"in {far} of {len(seen)} windows a predicted loss is off by more than half of "
                "what the method gained over the mean of all; run it without --fast"
            )
        session.warn_of_overlap(training=session.objective.batch_statistics)
        make_report = partial(_report, session, size, stride, seen, left_out)
        return write_results(None, outputs, make_report)[0]


def place_windows(k: int, size: int, stride: int) -> list[slice]:
    """Oldest first. The last ends at k; what is left over is at the beginning of the run."""
    ends = range(k, size - 1, -stride)
    return [slice(end - size, end) for end in reversed(ends)]


def _evaluate_windows(
    session: Session, asked: Asked, slices: Sequence[slice]
) -> tuple[list[_Seen], dict[str, LeftOut]]:
    """A comparison over each; also the checkpoints that were left out of any, by path.

    The newest window first: a broken loss shows in it. Of the others, one with so many broken
    checkpoints that its methods cannot be asked is left out.
    """
    seen: list[_Seen] = []
    left_out: dict[str, LeftOut] = {}
    for n, window in enumerate(reversed(slices), 1):
        inside = session.checkpoints[window]
        between = f"between {inside[0].path} and {inside[-1].path}"
        run = comparing(replace(session, checkpoints=inside))
        try:
            seen.insert(0, run.retry(partial(_evaluate, run, window, asked, between)))
        except TooFew as error:
            if n == 1:
                raise
            session.events.warn(f"a window is left out: {error}")
        except CheckpointError as error:
            if n == 1 or len(run.rows.left_out) < len(inside):
                raise
            session.events.warn(f"a window is left out: {error} {between}")
        left_out |= {out.path: out for out in run.rows.left_out}
        if n == 1 and all(row.selection_loss is None for row in seen[0].rows):
            raise TaskError(
                "loss() is NaN or Inf on the selection data for every average of the last window"
            )
        session.events.progress("windows", n, len(slices))
    return seen, left_out


def _evaluate(run: Run, window: slice, asked: Asked, between: str) -> _Seen:
    """A comparison over one window. What the model holds afterwards is of no importance."""
    evaluator, drafts = evaluate_all(run, asked, f"whole checkpoints {between}")
    with run.session.clock("evaluate"):
        is_off = evaluator.fast and any(True for _ in far_off(evaluator, asked, drafts))
    evaluator.close()
    return _Seen(
        where=window,
        used=run.used,
        rows=[draft.row for draft in drafts],
        placement=run.placed.placement,
        first=drafts[0].evaluated[0],
        averages=evaluator.ledger.count("evaluate"),
        far_off=is_off,
    )


def _report(
    session: Session,
    size: int,
    stride: int,
    seen: Sequence[_Seen],
    left_out: Mapping[str, LeftOut],
) -> Windows:
    checkpoints, newest = session.checkpoints, seen[-1]
    whole = {c.path for one in seen for c in one.used}
    used = [c for c in checkpoints if c.path in whole]
    index = {c.path: i for i, c in enumerate(used)}
    has_steps = all(c.step is not None for c in checkpoints)
    place = {c.path: i if c.step is None else c.step for i, c in enumerate(checkpoints, 1)}
    by: Literal["step", "checkpoint"] = "step" if has_steps else "checkpoint"
    measure: Measure = "selection_loss" if newest.first.heldout is None else "heldout_loss"
    windows = [
        Window(
            at=place[one.used[-1].path],
            first_step=one.used[0].step,
            last_step=one.used[-1].step,
            candidates=[index[c.path] for c in one.used],
            rows=mark_best(one.rows, measure),
            placement=one.placement,
        )
        for one in seen
    ]
    covered = {i for one in seen for i in range(len(checkpoints))[one.where]}
    return Windows(
        **session.report(used),
        size=size,
        stride=stride,
        left_out=[left_out[path] for c in checkpoints if (path := str(c.path)) in left_out],
        in_no_window=len(checkpoints) - len(covered),
        selection_rows=newest.first.selection_rows,
        heldout_rows=newest.first.heldout_rows,
        by=by,
        windows=windows,
        level=level_of(windows[-1], measure),
        reaches=find_reaches(windows, measure, by),
        batchnorm=session.scorer().recomputed_on,
        averages_evaluated=sum(one.averages for one in seen),
    )
