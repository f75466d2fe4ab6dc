"""Decide, once, whether a choice is better than the baselines on held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sewa_cli.direction import Goal, loss_of
from sewa_cli.objective.units import paired
from sewa_cli.report.findings import ContestFinding
from sewa_cli.report.shared import Interval, Rival, Verdict
from sewa_cli.scores import Scored
from sewa_cli.stats import difference


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


@dataclass(frozen=True)
class Lead:
    """The lead of a choice than another average on the same held-out parts.

    more  how many more parts would make it significant, if it is not
    """

    over: str
    by: float
    interval: Interval | None
    more: int | None

    @property
    def is_behind(self) -> bool:
        """Return whether the choice is significantly worse."""
        return self.interval is not None and self.interval.high < 0

    def difference(self, goal: Goal) -> tuple[float, Interval | None]:
        """Return the choice's score minus the other's."""
        if goal == "max":
            return self.by, self.interval
        return 0.0 - self.by, self.interval and self.interval.turned()


def judge_by_metric(found: ContestFinding, lead: Lead | None, over_last: Lead | None) -> Verdict:
    """Compare a choice by a metric with its rival and the last checkpoint, by held-out scores."""
    (_, own), *others = found.scores.items()
    if own.heldout is None:
        has_parts = found.heldout_parts is not None and found.heldout_evaluations > 0
        return Verdict(kind="not finite" if has_parts else "no held-out data")
    loss = loss_of(own.heldout, found.goal)
    better = [
        Rival(name=name, score=other.heldout, difference=own.heldout - other.heldout)
        for name, other in others
        if other.heldout is not None and loss_of(other.heldout, found.goal) < loss
    ]
    better.sort(key=lambda one: loss_of(one.score, found.goal))
    verdict, last = Verdict(kind="baseline"), None
    if lead is not None:
        verdict = decide(lead.over, *lead.difference(found.goal), found.heldout_used, found.goal)
    if over_last is not None and (score := found.scores[over_last.over].heldout) is not None:
        by, interval = over_last.difference(found.goal)
        last = Rival(
            name=over_last.over, score=score, difference=by, interval=interval, more=over_last.more
        )
    more = None if lead is None else lead.more
    return verdict.model_copy(update={"more": more, "last": last, "beaten_by": better})


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


def _better(own: Scored, baselines: Mapping[str, Scored], seed: int) -> list[Rival]:
    """Return the baselines with a lower held-out loss; NaN and Inf lose to all."""
    loss, found = own.scores.heldout_loss, []
    for name, other in baselines.items():
        lower = other.scores.heldout_loss
        if lower is not None and (loss is None or lower < loss):
            by, interval, _ = compare(own, other, seed) or (None, None, 0)
            found.append(Rival(name=name, score=lower, difference=by, interval=interval))
    return sorted(found, key=lambda better: better.score)
