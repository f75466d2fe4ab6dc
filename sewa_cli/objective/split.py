"""Never silently worse: rows kept aside if there are no held-out data, and what was gained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from sewa_cli.config import AUTO, Config
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.objective.intervals import FEWEST, compare_rows
from sewa_cli.objective.objective import UnitLosses
from sewa_cli.objective.tree import rows, take_rows
from sewa_cli.report.select import Gained, Guard
from sewa_cli.report.shared import Interval
from sewa_cli.task import Batches, Task


def check_settings(config: Config, task: Task) -> None:
    """Refuse now what could not be kept in the end."""
    if config.guard is not None and task.heldout_data is not None:
        raise ConfigError(f"--guard: {task.source} has heldout_data already; drop one of them")
    judged = task.heldout_data is not None or config.guard is not None
    for name in ("strict", "fallback"):
        if getattr(config, name) and not judged:
            raise ConfigError(
                f"--{name} needs held-out data: define heldout_data in {task.source}, or keep "
                "some of the selection data aside with --guard 0.2"
            )
    if config.solver != "linear":
        if config.K == AUTO:
            raise ConfigError("K: auto needs the linear solver; add --solver linear")
        if config.stable:
            raise ConfigError("--stable needs the linear solver; add --solver linear")


def keep_aside(task: Task, share: float, seed: int) -> tuple[Task, Guard]:
    """The task with a share of its selection rows as held-out data, at random, never to choose by.

    The selection data are held in memory from here on: a loader that shuffles would mix the two.
    """
    batches = [batch for batch in task.selection_data if rows(batch) > 0]
    counts = [rows(batch) for batch in batches]
    total, kept = sum(counts), round(share * sum(counts))
    if not 0 < kept < total:
        raise TaskError(f"--guard {share}: cannot keep {kept} of {total} selection rows aside")
    aside = torch.zeros(total, dtype=torch.bool)
    aside[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:kept]] = True
    parts = list(zip(batches, counts, torch.split(aside, counts), strict=True))

    def side(which: bool) -> list[object]:
        indices = [(batch, n, (part == which).nonzero().reshape(-1)) for batch, n, part in parts]
        return [take_rows(batch, n, index) for batch, n, index in indices if len(index)]

    selection, heldout = side(False), side(True)
    for part, expected in ((selection, total - kept), (heldout, kept)):
        if sum(map(rows, part)) != expected:
            raise TaskError("--guard: the selection batches do not split into rows")
    guarded = replace(
        task,
        selection_data=Batches(lambda: selection, "selection_data"),
        heldout_data=Batches(lambda: heldout, "selection_data kept aside"),
    )
    return guarded, Guard(share=share, rows=kept)


def gained(
    learned: UnitLosses | None, references: Mapping[str, UnitLosses | None], seed: int
) -> Gained | None:
    """How far the learned average lies below the best reference, held out, and how sure that is."""
    known = {name: units for name, units in references.items() if units is not None}
    if learned is None or not known:
        return None
    every = {name: units for name, units in known.items() if _is_finite(units)}
    if not _is_finite(learned) or not every:
        return None
    over = min(every, key=lambda name: every[name].mean)
    by = every[over].mean - learned.mean
    units = [learned, *every.values()]
    if all(u.rows is not None for u in units):
        losses = torch.stack([u.rows for u in units if u.rows is not None])
        weights = torch.ones_like(losses[0])
    else:
        losses, weights = torch.stack([u.batches for u in units]), learned.counts
    if len(weights) < FEWEST:
        return Gained(over=over, by=by, interval=None)
    spread = compare_rows(losses, weights, seed)
    # the interval is of a difference from the best row: the reference's, or the learned one's
    if spread.best == 0:
        low, high = spread.difference_intervals[1 + list(every).index(over)]
    else:
        high, low = (-bound for bound in spread.difference_intervals[0])
    return Gained(over=over, by=by, interval=Interval(low=low, high=high))


def _is_finite(units: UnitLosses) -> bool:
    return bool(torch.isfinite(units.batches).all())
