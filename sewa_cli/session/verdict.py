"""What a contest by a metric came to, on parts that had no say in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from sewa_cli import interrupts
from sewa_cli.methods import mean_of
from sewa_cli.objective.board import Average
from sewa_cli.objective.evidence import parts_needed
from sewa_cli.objective.intervals import FEWEST, compare_rows, difference
from sewa_cli.report.metric import Contest, Entry, MetricGain, MetricScores, State
from sewa_cli.report.shared import Interval
from sewa_cli.session.metric import Metric
from sewa_cli.solvers import Choice
from sewa_cli.solvers.contest import Outcome
from sewa_cli.task.scoring import Score
from sewa_cli.text import finite, with_K

MOST = 100  # failures that are listed
NEVER = 1_000_000  # parts that nobody will evaluate


@dataclass(frozen=True)
class Met:
    """Losses [R, n] of R averages on the held-out parts that any of them has a score for.

    known  [R, n]: where not, the part has failed, and `worst` stands for its loss
    kept   [parts]: which of all parts these are
    worst  above every loss there is; None: nothing has failed but what fails for all
    """

    losses: Tensor
    known: Tensor
    kept: Tensor
    worst: float | None

    @property
    def has_scores(self) -> list[bool]:
        """Row by row: one that fails on every part has no mean to speak of."""
        found: list[bool] = self.known.any(dim=1).tolist()
        return found

    @property
    def left_out(self) -> int:
        return int((~self.kept).sum())


def meet(losses: Tensor) -> Met:
    """Losses [R, parts], not finite where a part has failed, with no such gaps.

    A part that fails for all says nothing about any. One that fails for some counts for them as
    worse than all that did not fail, by the rule of the contest (`Board.losses`): the mean over
    what an average survives would flatter one that fails where it is hard.
    """
    known = losses.isfinite()
    kept = known.any(dim=0)
    some, known = losses[:, kept], known[:, kept]
    if bool(known.all()):
        return Met(some, known, kept, None)
    low, high = float(some[known].min()), float(some[known].max())
    worst = high + (high - low or abs(high) or 1.0)
    return Met(some.where(known, worst), known, kept, worst)


def judge(metric: Metric, choice: Choice) -> tuple[Choice, Contest]:
    """Score the choice, those it had to beat, and who led, on held-out parts.

    The choice is the last checkpoint where any parts show that to be better.
    """
    outcome, config, board = choice.outcome, metric.run.session.config, metric.board
    assert outcome is not None
    taken, k = outcome.taken, metric.run.trajectory.k
    others = (outcome.incumbent, outcome.leader, outcome.baseline)
    shown = {entrant.label: entrant.average for entrant in (taken, *others) if entrant is not None}
    for name, some in (("last", [k - 1]), ("uniform", range(k))):
        if (average := tuple(mean_of(some, k))) not in shown.values():
            shown[name] = average
    names, averages = [*shown], [*shown.values()]
    last = averages.index(tuple(mean_of([k - 1], k)))
    scored = _scored(metric, averages)
    met = meet(torch.stack([metric.heldout_losses(found) for found in scored])) if scored else None
    scores = dict(zip(shown, _scores(metric, averages, scored, met), strict=True))

    def gain(over: str, own: str) -> MetricGain | None:
        if met is None or over == own:
            return None
        return _gain(metric, met, over, names.index(over), names.index(own))

    over_last, overruled = gain(names[last], taken.label), None
    if _is_worse(over_last) or _is_worse(_searched(metric, taken.average, averages[last])):
        overruled, over_last = taken.label, None
        scores = {names[last]: scores[names[last]], **scores}
        choice = Choice([*averages[last]], names[last], outcome=outcome, history=choice.history)
    over = _rival(outcome) if overruled is None else overruled
    gained = None if over is None else gain(over, next(iter(scores)))
    if gained is not None and gained.over == names[last]:
        over_last = None
    return choice, Contest(
        metric=metric.name,
        goal=metric.goal,
        budget=config.objective.budget,
        evaluations=board.spent,
        heldout_evaluations=metric.heldout_evaluations,
        failures=board.failures[:MOST],
        interrupted=board.interrupted,
        parts=board.parts,
        heldout_parts=metric.heldout_parts,
        heldout_left_out=met.left_out if met else 0,
        failure_counts_as=_score(metric, met.worst) if met else None,
        incumbent=outcome.incumbent.label,
        overruled=overruled,
        unspent=outcome.unspent,
        leader=outcome.leader.label,
        asked=sum(bool(board.parts_of(average)) for average in board.found),
        met=_met(metric, outcome),
        crowned=outcome.crowned,
        evidence=outcome.evidence,
        ahead=finite(outcome.ahead),
        dueled=outcome.dueled,
        entries=[_entry(metric, outcome, entry, next(iter(scores))) for entry in outcome.entries],
        scores=scores,
        gained=gained,
        over_last=over_last,
    )


def _searched(metric: Metric, own: Average, last: Average) -> MetricGain | None:
    """What was written next to the last checkpoint, on the parts to choose by that both met."""
    board = metric.board
    parts = sorted({*board.parts_of(own)} & {*board.parts_of(last)})
    if not parts:
        return None
    losses = board.losses(last, parts), board.losses(own, parts)
    by, interval = difference(*losses, board.weights[parts], metric.run.session.config.seed)
    return MetricGain(over="last", by=by, interval=interval, more=None)


def _is_worse(gain: MetricGain | None) -> bool:
    """Whether that is significant."""
    return gain is not None and gain.interval is not None and (gain.interval.high or 0.0) < 0


def _scored(metric: Metric, averages: Sequence[Average]) -> list[list[Score]]:
    """Held out, one for each; none at all: there are no such parts, or Ctrl-C was pressed."""
    try:
        found = [metric.score_heldout(average) for average in averages]
    except KeyboardInterrupt:  # the choice is made: it is not lost with its last scores
        is_second = metric.board.interrupted
        if is_second or metric.run.session.config.strict or not interrupts.forgive():
            raise
        metric.board.interrupted = True
        metric.run.session.events.warn(
            "interrupted: what was chosen is written without held-out scores (Ctrl-C again ends "
            "it all)"
        )
        return []
    return [scores for scores in found if scores is not None]


def _rival(outcome: Outcome) -> str | None:
    """The one to be paired with what is written."""
    if outcome.taken.average != outcome.incumbent.average:
        return outcome.incumbent.label
    if outcome.leader.average != outcome.taken.average:
        return outcome.leader.label
    return None if outcome.baseline is None else outcome.baseline.label


def _met(metric: Metric, outcome: Outcome) -> int:
    """How many others were asked on a part that the incumbent was asked on."""
    board, own = metric.board, outcome.incumbent.average
    parts = {*board.parts_of(own)}
    return sum(
        not parts.isdisjoint(board.parts_of(average)) for average in board.found if average != own
    )


def _entry(metric: Metric, outcome: Outcome, entry: Entry, written: str) -> Entry:
    """The leader has the duel's e-value, others none: they were picked by the parts they met."""
    is_other = outcome.leader.average != outcome.incumbent.average
    state = "taken" if outcome.crowned else "leading"
    has_dueled = is_other and outcome.crowned is not None and entry.state == state
    own_state: State | None = "taken" if with_K(entry.name, entry.K) == written else entry.state
    if own_state == "taken" and with_K(entry.name, entry.K) != written:
        own_state = "overruled"
    return entry.model_copy(
        update={
            "state": own_state,
            "score": None if entry.score is None else metric.score(entry.score),
            "evidence": outcome.evidence if has_dueled else None,
        }
    )


def _scores(
    metric: Metric, averages: Sequence[Average], heldout: Sequence[Sequence[Score]], met: Met | None
) -> list[MetricScores]:
    """One for each average; `heldout`: for each as well, or there are no such parts."""
    chosen = [_selection(metric, average) for average in averages]
    if met is None:
        return chosen
    weights = metric.heldout_weights[met.kept]
    rows = [row for row, has_scores in enumerate(met.has_scores) if has_scores]
    intervals: dict[int, Interval | None] = {}
    if rows and len(weights) >= FEWEST:
        spread = compare_rows(met.losses[rows], weights, metric.run.session.config.seed)
        intervals = {
            row: _interval(metric, ends) for row, ends in zip(rows, spread.intervals, strict=True)
        }
    return [
        scores.model_copy(
            update={
                "heldout": _score(metric, float(met.losses[row] @ weights / weights.sum()))
                if row in rows
                else None,
                "failed": int((~met.known[row]).sum()),
                "interval": intervals.get(row),
                "others": means_of_others(metric, heldout[row]),
            }
        )
        for row, scores in enumerate(chosen)
    ]


def _interval(metric: Metric, ends: tuple[float, float]) -> Interval | None:
    low, high = sorted(metric.score(end) for end in ends)
    return Interval(low=low, high=high) if isfinite(low) and isfinite(high) else None


def _selection(metric: Metric, average: Average) -> MetricScores:
    """On the parts to choose by; no score: it was asked on none, or has failed on one."""
    board = metric.board
    is_known = average in board.found and not board.has_failed(average)
    return MetricScores(
        selection=_score(metric, board.mean(average)) if is_known else None,
        selection_parts=len(board.parts_of(average)),
    )


def _score(metric: Metric, loss: float | None) -> float | None:
    known = finite(loss)
    return None if known is None else metric.score(known)


def means_of_others(metric: Metric, scores: Sequence[Score]) -> dict[str, float | None] | None:
    """Of what else score() gives, over the held-out parts that did not fail."""
    losses, weights = metric.heldout_losses(scores).tolist(), metric.heldout_weights.tolist()
    there = [
        (score, weight)
        for score, loss, weight in zip(scores, losses, weights, strict=True)
        if isfinite(loss)
    ]
    names = sorted({name for score, _ in there for name in score} - {"", metric.name})
    total = sum(weight for _, weight in there)
    means = {
        name: finite(sum(weight * score[name] for score, weight in there) / total)
        for name in names
        if all(name in score for score, _ in there)
    }
    return means or None


def _gain(metric: Metric, met: Met, over: str, other: int, own: int) -> MetricGain | None:
    """By the parts that either of the two has a score for, whatever others make of them."""
    if not (met.has_scores[other] and met.has_scores[own]):
        return None
    either = met.known[other] | met.known[own]
    theirs, mine = met.losses[other][either], met.losses[own][either]
    weights = metric.heldout_weights[met.kept][either]
    by, interval = difference(theirs, mine, weights, metric.run.session.config.seed)
    if not isfinite(by):
        return None
    if interval is not None:
        low, high = 0.0 + interval.low, 0.0 + interval.high  # no -0
        interval = Interval(low=low, high=high) if isfinite(low) and isfinite(high) else None
    more = None
    if interval is not None and interval.low <= 0 <= interval.high:
        needed = parts_needed((theirs - mine) * (weights / weights.mean()))
        more = needed - len(mine) if needed is not None and len(mine) < needed < NEVER else None
    return MetricGain(over=over, by=0.0 + by, interval=interval, more=more)
