"""Scores of a choice by a metric, and of those it had to beat, on held-out parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from sewa_cli import interrupts
from sewa_cli.direction import Criterion
from sewa_cli.judge import Lead, judge_by_metric
from sewa_cli.methods import by_steps, mean_of
from sewa_cli.opening import Clock
from sewa_cli.report.findings import ContestFinding, History, MetricScores, State
from sewa_cli.report.shared import Interval, Verdict
from sewa_cli.scoring.metric import Metric
from sewa_cli.solvers import Choice, Solver
from sewa_cli.solvers.board import Average
from sewa_cli.solvers.contest import LISTED, Outcome
from sewa_cli.stats import FEWEST_UNITS, compare_rows, difference, parts_needed
from sewa_cli.task.scoring import Score, total, totals
from sewa_cli.text import finite, with_K

MOST = 1_000_000  # more parts than that nobody will evaluate


@dataclass(frozen=True)
class Filled:
    """Scores [R, n] of R averages on the held-out parts that any of them has a score on.

    known    [R, n]; where not, the part has failed, and its score is `failure`
    kept     [parts]; which of all parts these are
    failure  worse than all scores; None: nothing has failed but what fails for all
    """

    scores: Tensor
    known: Tensor
    kept: Tensor
    failure: float | None

    @property
    def has_scores(self) -> list[bool]:
        """Return for each average whether there is any part that it has not failed on."""
        found: list[bool] = self.known.any(dim=1).tolist()
        return found

    @property
    def left_out(self) -> int:
        return int((~self.kept).sum())


def fill_failures(scores: Tensor, criterion: Criterion) -> Filled:
    """Replace scores [R, parts] that are not finite.

    A part that fails for all says nothing about any, and is left out. One that fails for some
    counts for them as worse than all others, by the rule of `Board.scores`: the mean over what an
    average survives would flatter an average that fails where it is hard.
    """
    known = scores.isfinite()
    kept = known.any(dim=0)
    some, known = scores[:, kept], known[:, kept]
    if bool(known.all()):
        return Filled(some, known, kept, None)
    failure = criterion.below(float(some[known].min()), float(some[known].max()))
    return Filled(some.where(known, failure), known, kept, failure)


def choose_by_metric(
    metric: Metric, solver: Solver, K: int, clock: Clock
) -> tuple[Choice, Verdict]:
    """Let averages compete; score the choice and its references on held-out parts."""
    with clock("learn"):
        problem = metric.problem()
        metric.follow()
        choice = solver.choose(problem, K)
        metric.events.progress("evaluating", metric.board.spent, metric.board.spent)
    with clock("evaluate"):
        return confirm(metric, choice)


def confirm(metric: Metric, choice: Choice) -> tuple[Choice, Verdict]:
    """Score the choice and its references on held-out parts; judge it and add the contest.

    The choice is the last checkpoint where any parts show that to be significantly better.
    """
    outcome, board, k = choice.find(Outcome), metric.board, metric.basis.trajectory.k
    assert outcome is not None
    taken, last = outcome.taken, tuple(mean_of([k - 1], k))
    uniform = by_steps(mean_of(range(k), k), metric.basis.counts)
    entrants = (taken, outcome.incumbent, outcome.leader, outcome.baseline)
    averages = {entrant.label: entrant.average for entrant in entrants if entrant is not None}
    for name, average in (("last", last), ("uniform", tuple(uniform))):
        is_free = not metric.judge.whole or average in board.found
        if average not in averages.values() and (is_free or name == "last"):
            averages[name] = average
    names = [*averages]
    name_of_last = next(name for name in names if averages[name] == last)
    found = _score_all(metric, [*averages.values()])
    filled = None
    if found:
        filled = fill_failures(torch.stack([metric.pick(one) for one in found]), metric.criterion)
    scores = dict(zip(names, _reported(metric, [*averages.values()], found, filled), strict=True))

    def lead(over: str, own: str) -> Lead | None:
        if filled is None or over == own:
            return None
        return _lead(metric, filled, over, names.index(over), names.index(own))

    over_last, overruled = lead(name_of_last, taken.label), None
    to_choose_by = _lead_to_choose_by(metric, taken.average, last)
    if any(one is not None and one.is_behind for one in (over_last, to_choose_by)):
        overruled, over_last = taken.label, None
        scores = {name_of_last: scores[name_of_last], **scores}
        history = choice.find(History)
        choice = Choice([*last], name_of_last, [history] if history else [])
    written = next(iter(scores))
    over = overruled or _rival(outcome)
    if over == name_of_last:
        over_last = None
    entries = outcome.entries
    if overruled is not None:
        states: dict[str, State] = {overruled: "overruled", written: "taken"}
        entries = [
            entry.model_copy(update={"state": states.get(with_K(entry.name, entry.K), entry.state)})
            for entry in entries
        ]
    contest = ContestFinding(
        metric=metric.criterion.name,
        goal=metric.criterion.goal,
        budget=metric.config.objective.budget,
        evaluations=board.spent,
        heldout_evaluations=metric.heldout_evaluations,
        failures=board.failures[:LISTED],
        interrupted=board.interrupted,
        parts=board.parts,
        heldout_parts=metric.heldout_parts,
        heldout_left_out=filled.left_out if filled else 0,
        failure_counts_as=finite(filled.failure) if filled else None,
        incumbent=outcome.incumbent.label,
        overruled=overruled,
        unspent=outcome.unspent,
        leader=outcome.leader.label,
        asked=sum(bool(board.parts_of(average)) for average in board.found),
        confirmed=outcome.confirmed,
        evidence=outcome.evidence,
        ahead=finite(outcome.ahead),
        duel_parts=outcome.duel_parts,
        entries=entries,
        scores=scores,
    )
    found_lead = None if over is None else lead(over, written)
    return choice.having(contest), judge_by_metric(contest, found_lead, over_last)


def _score_all(metric: Metric, averages: Sequence[Average]) -> list[list[Score]]:
    """Return held-out scores of each; none if there are no such parts, or after Ctrl-C."""
    try:
        found = [metric.score_heldout(average) for average in averages]
    except KeyboardInterrupt:  # the choice is made: it is not lost with its last scores
        is_second = metric.board.interrupted
        if is_second or metric.config.strict or not interrupts.resume():
            raise
        metric.board.interrupted = True
        metric.events.warn(
            "interrupted: what was chosen is written without held-out scores (Ctrl-C again ends "
            "it all)"
        )
        return []
    return [scores for scores in found if scores is not None]


def _reported(
    metric: Metric,
    averages: Sequence[Average],
    heldout: Sequence[Sequence[Score]],
    filled: Filled | None,
) -> list[MetricScores]:
    """Return the scores of each average, to choose by and held out."""
    board, found = metric.board, list[MetricScores]()
    for average in averages:  # without a score if it was asked on no part, or has failed on one
        is_known = average in board.found and not board.has_failed(average)
        selection = finite(board.mean(average)) if is_known else None
        count = len(board.parts_of(average))
        found.append(MetricScores(selection=selection, selection_parts=count, heldout=None))
    if filled is None:
        return found
    weights = metric.weights["heldout"][filled.kept]
    rows = [row for row, has_scores in enumerate(filled.has_scores) if has_scores]
    intervals: dict[int, Interval | None] = {}
    if rows and len(weights) >= FEWEST_UNITS:
        spread = compare_rows(filled.scores[rows], weights, metric.config.seed)
        intervals = {row: _finite(*ends) for row, ends in zip(rows, spread.intervals, strict=True)}
    means = (filled.scores @ weights / weights.sum()).tolist()
    for row in rows:
        if filled.failure is None:  # to the last digit, which a mean of units may not be
            found_by = metric.judge.pick(heldout[row])
            kept = [one for one, is_kept in zip(found_by, filled.kept, strict=True) if is_kept]
            means[row] = total(metric.criterion.name, kept, weights.tolist(), metric.judge.corpus)
    return [
        scores.model_copy(
            update={
                "heldout": finite(means[row]) if row in rows else None,
                "failed": int((~filled.known[row]).sum()),
                "interval": intervals.get(row),
                "others": means_of_others(metric, heldout[row]),
            }
        )
        for row, scores in enumerate(found)
    ]


def means_of_others(metric: Metric, scores: Sequence[Score]) -> dict[str, float | None] | None:
    """Return means of what else score() gives, over the held-out parts that did not fail."""
    values, weights = metric.pick(scores).tolist(), metric.weights["heldout"].tolist()
    known = [i for i, value in enumerate(values) if isfinite(value)]
    others = [
        {name: one for name, one in scores[i].items() if name not in ("", metric.criterion.name)}
        for i in known
    ]
    means = totals(others, [weights[i] for i in known], metric.judge.corpus)
    return {name: finite(means[name]) for name in sorted(means)} or None


def _lead(metric: Metric, filled: Filled, over: str, other: int, own: int) -> Lead | None:
    """Compare two averages on the held-out parts that either of them has a score on."""
    if not (filled.has_scores[other] and filled.has_scores[own]):
        return None
    either = filled.known[other] | filled.known[own]
    lead = metric.criterion.lead(filled.scores[own][either], filled.scores[other][either])
    return _mean_lead(metric, over, lead, metric.weights["heldout"][filled.kept][either])


def _lead_to_choose_by(metric: Metric, own: Average, last: Average) -> Lead | None:
    """Compare the choice with the last checkpoint on the parts to choose by of both."""
    board = metric.board
    parts = sorted({*board.parts_of(own)} & {*board.parts_of(last)})
    if not parts:
        return None
    lead = metric.criterion.lead(board.scores(own, parts), board.scores(last, parts))
    return _mean_lead(metric, "last", lead, board.weights[parts])


def _mean_lead(metric: Metric, over: str, lead: Tensor, weights: Tensor) -> Lead | None:
    seed = metric.config.seed
    by, interval = difference(lead, torch.zeros_like(lead), weights, seed)
    if not isfinite(by):
        return None
    interval = None if interval is None else _finite(interval.low, interval.high)
    more = None
    if interval is not None and interval.low <= 0 <= interval.high:
        needed = parts_needed(lead * (weights / weights.mean()))
        more = needed - len(lead) if needed is not None and len(lead) < needed < MOST else None
    return Lead(over, 0.0 + by, interval, more)


def _finite(low: float, high: float) -> Interval | None:
    """Return an interval without -0, or None."""
    return Interval(low=0.0 + low, high=0.0 + high) if isfinite(low) and isfinite(high) else None


def _rival(outcome: Outcome) -> str | None:
    """Return the one to be paired with what is written."""
    if outcome.taken.average != outcome.incumbent.average:
        return outcome.incumbent.label
    if outcome.leader.average != outcome.taken.average:
        return outcome.leader.label
    return None if outcome.baseline is None else outcome.baseline.label
