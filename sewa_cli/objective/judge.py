"""Decide, once, whether a choice is better than the baselines on held-out data."""

from __future__ import annotations

from collections.abc import Mapping

from sewa_cli.direction import Goal, loss_of
from sewa_cli.objective.intervals import difference, paired
from sewa_cli.objective.scorer import Scored
from sewa_cli.report.select import Contest
from sewa_cli.report.shared import Better, Interval, Verdict


def judge(
    own: Scored, baselines: Mapping[str, Scored], best: str, seed: int, *, is_baseline: bool
) -> Verdict:
    """Compare a choice with the best baseline by held-out losses, and with all the others.

    baselines  those that differ from the choice
    best       the one with the lowest selection loss
    """
    beaten_by = _better(own, baselines, seed)
    if own.heldout is not None and not own.heldout.is_finite:
        return Verdict(kind="not finite", beaten_by=beaten_by)
    if is_baseline:
        return Verdict(kind="baseline", beaten_by=beaten_by)
    if own.heldout is None:
        return Verdict(kind="no held-out data")
    if best not in baselines:
        return Verdict(kind="baseline", baseline=best, beaten_by=beaten_by)
    found = compare(own, baselines[best], seed)
    if found is None:
        return Verdict(kind="baseline not finite", baseline=best, beaten_by=beaten_by)
    by, interval, n = found
    verdict = decide(best, by, interval, n)
    return verdict.model_copy(update={"beaten_by": beaten_by})


def judge_by_metric(found: Contest) -> Verdict:
    """Compare a choice by a metric with its rival, by held-out scores."""
    (_, own), *others = found.scores.items()
    if own.heldout is None:
        has_parts = found.heldout_parts is not None and found.heldout_evaluations > 0
        return Verdict(kind="not finite" if has_parts else "no held-out data")
    loss = loss_of(own.heldout, found.goal)
    better = [
        Better(name=name, score=other.heldout, difference=own.heldout - other.heldout)
        for name, other in others
        if other.heldout is not None and loss_of(other.heldout, found.goal) < loss
    ]
    better.sort(key=lambda one: loss_of(one.score, found.goal))
    verdict = Verdict(kind="baseline")
    if found.gained is not None:
        by, interval = found.gained.by, found.gained.interval
        if found.goal == "min":
            by, interval = 0.0 - by, interval and interval.turned()
        verdict = decide(found.gained.over, by, interval, found.heldout_used, found.goal)
    return verdict.model_copy(update={"beaten_by": better})


def decide(
    baseline: str, by: float, interval: Interval | None, n: int, goal: Goal = "min"
) -> Verdict:
    """Return the verdict on a difference; `by`: the choice's score minus the baseline's."""
    found = Verdict(kind="too few", baseline=baseline, difference=by, interval=interval, n=n)
    if interval is None:
        return found
    if interval.has_zero():
        return found.model_copy(update={"kind": "not significant"})
    is_better = (interval.high < 0) == (goal == "min")
    return found.model_copy(update={"kind": "better" if is_better else "worse"})


def compare(own: Scored, other: Scored, seed: int) -> tuple[float, Interval | None, int] | None:
    """Return the difference of two held-out losses, its interval and the number of units.

    None: one of the losses is not finite.
    """
    mine, theirs = own.heldout, other.heldout
    if mine is None or theirs is None or not (mine.is_finite and theirs.is_finite):
        return None
    losses, weights, _ = paired([theirs, mine])
    _, interval = difference(losses[0], losses[1], weights, seed)
    return mine.mean - theirs.mean, interval and interval.turned(), len(weights)


def _better(own: Scored, baselines: Mapping[str, Scored], seed: int) -> list[Better]:
    """Return the baselines with a lower held-out loss; NaN and Inf lose to all."""
    loss, found = own.scores.heldout_loss, []
    for name, other in baselines.items():
        lower = other.scores.heldout_loss
        if lower is not None and (loss is None or lower < loss):
            by, interval, _ = compare(own, other, seed) or (None, None, 0)
            found.append(Better(name=name, score=lower, difference=by, interval=interval))
    return sorted(found, key=lambda better: better.score)
