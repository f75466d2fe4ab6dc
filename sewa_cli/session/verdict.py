"""What a contest by a metric came to, on parts that had no say in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sewa_cli.methods import mean_of
from sewa_cli.objective.board import Average
from sewa_cli.objective.evidence import parts_needed
from sewa_cli.objective.intervals import FEWEST, compare_rows, difference
from sewa_cli.report.metric import Contest, MetricGain, MetricScores
from sewa_cli.report.shared import Interval
from sewa_cli.session.metric import Metric
from sewa_cli.solvers import Choice
from sewa_cli.solvers.contest import Entrant
from sewa_cli.task.scoring import Score
from sewa_cli.text import finite

MOST = 100  # failures that are listed
NEVER = 1_000_000  # parts that nobody will evaluate


def judge(metric: Metric, choice: Choice) -> Contest:
    """The one that is written, those it had to beat, and who led, held out."""
    outcome, config, board = choice.outcome, metric.run.session.config, metric.board
    assert outcome is not None
    taken = outcome.leader
    if outcome.leader.average != tuple(choice.coefficients):
        taken = outcome.incumbent
    k = metric.run.trajectory.k
    shown = {
        entrant.label: entrant.average for entrant in (taken, outcome.incumbent, outcome.leader)
    }
    simple = _best_simple(metric, choice)
    if simple is not None:
        shown.setdefault(simple.label, simple.average)
    for name, some in (("last", [k - 1]), ("uniform", range(k))):
        if (average := tuple(mean_of(some, k))) not in shown.values():
            shown[name] = average
    heldout = {name: metric.score_heldout(average) for name, average in shown.items()}
    losses = {name: metric.heldout_losses(found) for name, found in heldout.items() if found}
    kept = _finite_everywhere(losses)
    scores = _scores(metric, shown, heldout, losses, kept)
    over = simple if taken.average == outcome.incumbent.average else outcome.incumbent
    gained = None
    if over is not None and over.average != taken.average and losses and bool(kept.any()):
        gained = _gain(losses[over.label][kept], losses[taken.label][kept], over.label, config.seed)
    return Contest(
        metric=metric.name,
        goal=metric.goal,
        budget=config.objective.budget,
        evaluations=board.spent,
        heldout_evaluations=metric.heldout_evaluations,
        failures=board.failures[:MOST],
        interrupted=board.interrupted,
        parts=board.parts,
        heldout_parts=metric.heldout_parts,
        incumbent=outcome.incumbent.label,
        leader=outcome.leader.label,
        crowned=outcome.crowned,
        evidence=outcome.evidence,
        entries=[
            entry.model_copy(
                update={"score": None if entry.score is None else metric.score(entry.score)}
            )
            for entry in outcome.entries
        ],
        scores=scores,
        gained=gained,
    )


def _best_simple(metric: Metric, choice: Choice) -> Entrant | None:
    """Of the simple averages that were in the contest, the best by the parts to choose by."""
    outcome, simple = choice.outcome, metric.simple
    assert outcome is not None
    found = [entry for entry in outcome.entries if (entry.name, entry.K) in simple]
    if not found:
        return None
    most = max(entry.parts for entry in found)
    best = next(entry for entry in found if entry.parts >= most / 2)
    return Entrant(best.name, best.K, tuple(simple[best.name, best.K]))


def _finite_everywhere(losses: Mapping[str, Tensor]) -> Tensor:
    if not losses:
        return torch.zeros(0, dtype=torch.bool)
    return torch.stack(list(losses.values())).isfinite().all(dim=0)


def _scores(
    metric: Metric,
    shown: Mapping[str, Average],
    heldout: Mapping[str, Sequence[Score] | None],
    losses: Mapping[str, Tensor],
    kept: Tensor,
) -> dict[str, MetricScores]:
    intervals: dict[str, Interval] = {}
    if int(kept.sum()) >= FEWEST:
        rows = torch.stack([found[kept] for found in losses.values()])
        spread = compare_rows(
            rows, torch.ones(rows.shape[1]).double(), metric.run.session.config.seed
        )
        for name, ends in zip(losses, spread.intervals, strict=True):
            low, high = sorted(metric.score(end) for end in ends)
            intervals[name] = Interval(low=low, high=high)
    return {
        name: MetricScores(
            selection=_selection(metric, average),
            heldout=_score(metric, float(losses[name][kept].mean())) if kept.any() else None,
            interval=intervals.get(name),
            others=metric.means_of_others(
                [one for one, is_kept in zip(heldout[name] or (), kept, strict=False) if is_kept]
            ),
        )
        for name, average in shown.items()
    }


def _selection(metric: Metric, average: Average) -> float | None:
    """On the parts to choose by; None: it was asked on none, or has failed on one."""
    board = metric.board
    is_known = average in board.found and not board.has_failed(average)
    return _score(metric, board.mean(average)) if is_known else None


def _score(metric: Metric, loss: float) -> float | None:
    known = finite(loss)
    return None if known is None else metric.score(known)


def _gain(other: Tensor, own: Tensor, over: str, seed: int) -> MetricGain:
    by, interval = difference(other, own, torch.ones(len(own), dtype=torch.float64), seed)
    more = None
    if interval is not None and interval.low <= 0 <= interval.high:
        needed = parts_needed(other - own)
        more = needed - len(own) if needed is not None and len(own) < needed < NEVER else None
    return MetricGain(over=over, by=by, interval=interval, more=more)
