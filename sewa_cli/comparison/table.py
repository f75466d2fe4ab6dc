"""Every method at every K over one set of checkpoints, and which differences are real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from sewa_cli.comparison.evaluator import Evaluator, open_evaluator
from sewa_cli.config import AUTO, Config
from sewa_cli.config.models import DEFAULT_METHODS, WITHOUT_A_LOSS
from sewa_cli.direction import Criterion
from sewa_cli.errors import ConfigError
from sewa_cli.events import Events
from sewa_cli.methods import Call, mean_of, parse
from sewa_cli.objective.intervals import FEWEST, Spread, Unit, compare_rows, paired
from sewa_cli.objective.scorer import Scored
from sewa_cli.objective.units import UnitLosses
from sewa_cli.report.compare import Judged, Row, RowScore
from sewa_cli.report.shared import Interval
from sewa_cli.rng import seeded
from sewa_cli.session.extensions import propose, register_methods
from sewa_cli.session.heldout import fill_failures
from sewa_cli.session.run import Setup
from sewa_cli.session.session import check_budget
from sewa_cli.settings import USUAL
from sewa_cli.text import finite, with_K

SMALL = 0.01  # of the loss: an error that nobody would act on


@dataclass(frozen=True)
class ComparisonPlan:
    """The methods and budgets that are to be compared."""

    calls: list[Call]
    budgets: list[int]

    @classmethod
    def by(cls, config: Config, events: Events, *, has_loss: bool = True) -> ComparisonPlan:
        register_methods(config, events)
        if config.lora == "merged":
            raise ConfigError(
                "lora: compare averages A and B apart; `select` and `average` can merge"
            )
        methods = config.compare.methods
        if methods == DEFAULT_METHODS and not has_loss:
            methods = WITHOUT_A_LOSS
        calls = parse(methods)
        budgets = sorted(set(config.compare.K)) or [config.K]
        return cls(calls, budgets)

    def of(self, k: int) -> ComparisonPlan:
        """Settle the K for k checkpoints; `sewa` must have something to choose."""
        if self.budgets == [AUTO]:
            return replace(self, budgets=[min(USUAL, k - 1)])
        K = max(self.budgets)
        for call in self.calls:
            most = k - 1 if call.method.name == "sewa" else k
            if call.method.has_budget and most < K:
                raise ConfigError(
                    f"K: {K} of {k} checkpoints is too many for {call.label}; K must be at most "
                    f"{most}"
                )
        return self

    def rows(self) -> list[tuple[Call, int | None]]:
        return [
            (call, K)
            for call in self.calls
            for K in (self.budgets if call.method.has_budget else [None])
        ]


@dataclass(frozen=True)
class Draft:
    """A row before the rows are compared with each other: no intervals, no mark."""

    row: Row
    evaluated: list[Scored]  # draw by draw

    @property
    def heldout(self) -> UnitLosses | None:
        """Loss by loss; of several draws, their mean: a draw more or less is no other example."""
        found = [one.heldout for one in self.evaluated if one.heldout is not None]
        if not found or not all(units.is_finite for units in found):
            return None
        by_row = [units.rows for units in found if units.rows is not None]
        return UnitLosses(
            torch.stack([units.batches for units in found]).mean(0),
            found[0].counts,
            torch.stack(by_row).mean(0) if len(by_row) == len(found) else None,
            groups=found[0].groups,
        )


def evaluate_all(setup: Setup, asked: ComparisonPlan) -> tuple[Evaluator, list[Draft]]:
    """Read the checkpoints, then evaluate every method at every K."""
    clock, events = setup.session.clock, setup.session.events
    with clock("read"):
        run = setup.place()
        check_budget(0, run.used)
        asked = asked.of(run.trajectory.k)
    evaluator, rows = open_evaluator(run, setup.solver), asked.rows()
    drafts = []
    try:
        with clock("evaluate"):
            evaluator.settle_examples()
            for call, K in events.over("comparing", rows, len(rows)):
                drafts.append(_draft(evaluator, call, K))
    except BaseException:  # out of memory: another evaluator begins again with its own workers
        evaluator.close()
        raise
    return evaluator, drafts


def _draft(evaluator: Evaluator, call: Call, K: int | None) -> Draft:
    evaluator.begin_row()
    with seeded(evaluator.seed):
        draws = propose(call, evaluator.proposing(), K)
    evaluated = [evaluator.evaluate(coefficients) for coefficients in draws]
    cost = evaluator.ledger.next_row()
    predicted = error = None
    if evaluator.fast:
        predicted = _mean([evaluator.predicted_loss(c) for c in draws])
        true = _mean([finite(evaluator.selection_loss(c)) for c in draws])
        error = None if predicted is None or true is None else predicted - true
        evaluator.ledger.next_row()  # our own curiosity is not the method's cost
    row = Row(
        method=call.label,
        K=K,
        size=max(sum(c != 0 for c in coefficients) for coefficients in draws),
        coefficients=draws,
        selection_loss=_mean([one.scores.selection_loss for one in evaluated]),
        predicted_loss=predicted,
        surrogate_error=error,
        **_heldout_of([one.heldout for one in evaluated]),
        interval=None,
        difference=None,
        difference_interval=None,
        mark=None,
        contest=evaluator.contested,
        metrics=_mean_metrics([one.scores.metrics for one in evaluated]),
        cost=cost,
    )
    return Draft(row, evaluated)


def far_off(evaluator: Evaluator, asked: ComparisonPlan, drafts: Sequence[Draft]) -> Iterator[str]:
    """Warn of predictions that are off by more than half of what the method has gained."""
    searching = {call.label for call in asked.calls if call.method.needs_loss}
    k = evaluator.run.trajectory.k
    uniform = evaluator.selection_loss(mean_of(range(k), k))
    for row in (draft.row for draft in drafts):
        error, predicted = row.surrogate_error, row.predicted_loss
        if row.method not in searching or error is None or predicted is None:
            continue
        gained = uniform - (predicted - error)
        if abs(error) > max(abs(gained) / 2, SMALL * abs(uniform)):
            yield (
                f"{with_K(row.method, row.K)}: its predicted loss is off by {error:.3g}, and it "
                f"gained {gained:.3g} over the mean of all; run it without --fast"
            )


@dataclass(frozen=True)
class ComparedRows:
    """Rows compared with each other; `best`: the one with the lowest held-out loss."""

    rows: list[Row]
    best: int | None
    unit: Unit | Literal["parts"] | None  # what was resampled
    judged: Judged | None = None  # by what, and on which parts

    @property
    def winner(self) -> str | None:
        """Return the best row's name, if only equal averages tie with it."""
        if self.best is None or self.rows[self.best].mark != "best":
            return None
        best = self.rows[self.best]
        others = [row for row in self.rows if not _same_average(row, best)]
        sole = bool(others) and all(row.mark != "tie" for row in others)
        return with_K(best.method, best.K) if sole else None

    @property
    def verdict(self) -> Literal["winner", "tie", "too few", "equal", "alone", "none"]:
        if self.best is None:
            return "none"
        if all(_same_average(row, self.rows[self.best]) for row in self.rows):
            return "alone"
        behind = [row.score.behind if row.score else row.difference for row in self.rows]
        if all(value == 0 for value in behind):
            return "equal"
        if self.winner is not None:
            return "winner"
        return "too few" if self.rows[self.best].mark is None else "tie"


def compare_drafts(
    drafts: Sequence[Draft], seed: int, samples: int, events: Events, judged: Judged | None = None
) -> ComparedRows:
    """Marks and intervals, by resampling held-out rows; `judged`: their losses are a metric's."""
    failed, goal = [0] * len(drafts), judged.goal if judged else "min"
    if judged is not None:
        drafts, failed, judged = _on_common_parts(drafts, judged)
    units = {i: found for i, draft in enumerate(drafts) if (found := draft.heldout) is not None}
    spread: Spread | None = None
    unit: Unit | Literal["parts"] | None = None
    if units:
        losses, weights, unit = paired(list(units.values()))
        unit = unit if judged is None else "parts"
        if unit == "batches":
            events.warn("the loss does not split into rows, so whole batches are resampled")
        if len(weights) >= FEWEST:
            spread = compare_rows(losses, weights, seed, samples, goal)
        else:
            events.warn(
                f"{len(weights)} held-out {unit} are too few for intervals; {FEWEST} are needed"
            )
    at = {row: position for position, row in enumerate(units)}
    best = list(units)[spread.best] if spread is not None else None
    rows = [_row(draft, at.get(i), spread, i == best) for i, draft in enumerate(drafts)]
    if best is None and units:  # no intervals: the lowest is known, but nothing about its lead
        choose = min if goal == "min" else max
        best = choose(units, key=lambda i: rows[i].heldout_loss or 0.0)
    if judged is not None:
        rows = [_as_scores(*one) for one in zip(rows, failed, strict=True)]
    return ComparedRows(rows, best, unit, judged)


def _on_common_parts(
    drafts: Sequence[Draft], judged: Judged
) -> tuple[list[Draft], list[int], Judged]:
    """Keep the parts that any row has a score for, and count those each has failed on."""
    units = [one.heldout for draft in drafts for one in draft.evaluated if one.heldout is not None]
    values = torch.stack([one.batches for one in units])
    met = fill_failures(values, Criterion(judged.metric, judged.goal))
    counts = units[0].counts[met.kept]
    draws = iter(zip(met.scores, met.known, strict=True))
    changed, failed = [], []
    for draft in drafts:
        mine = [next(draws) for _ in draft.evaluated]
        known = torch.stack([known for _, known in mine])
        failed.append(int((~known.all(dim=0)).sum()))
        # of what fails on every part there is nothing to show but that
        found = [UnitLosses(losses, counts, None) if known.any() else None for losses, _ in mine]
        row = draft.row.model_copy(update=_heldout_of(found))
        pairs = zip(draft.evaluated, found, strict=True)
        changed.append(Draft(row, [replace(one, heldout=units) for one, units in pairs]))
    told = {
        "parts": len(counts),
        "left_out": met.left_out,
        "failure_counts_as": finite(met.failure),
    }
    return changed, failed, judged.model_copy(update=told)


def _heldout_of(draws: Sequence[UnitLosses | None]) -> dict[str, float | None]:
    losses = [units.mean for units in draws if units is not None]
    spread = finite(float(torch.tensor(losses).std())) if len(losses) > 1 else None
    return {"heldout_loss": _mean(losses), "spread": spread}


def _as_scores(row: Row, failed: int) -> Row:
    """Move a metric's scores to where they are reported."""
    score = RowScore(
        heldout=row.heldout_loss,
        failed=failed,
        interval=row.interval,
        behind=row.difference,
        behind_interval=row.difference_interval,
    )
    gone = ("heldout_loss", "interval", "difference", "difference_interval")
    return row.model_copy(update={**dict.fromkeys(gone), "score": score})


def _row(draft: Draft, position: int | None, spread: Spread | None, is_best: bool) -> Row:
    row = draft.row
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


def _same_average(one: Row, two: Row) -> bool:
    flat = [[round(c, 12) for draw in row.coefficients for c in draw] for row in (one, two)]
    return flat[0] == flat[1]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite(sum(known) / len(known)) if len(known) == len(values) and known else None


def _mean_metrics(
    metrics: Sequence[dict[str, float | None] | None],
) -> dict[str, float | None] | None:
    found = [one for one in metrics if one is not None]
    names = dict.fromkeys(name for one in found for name in one)
    return {name: _mean([one.get(name) for one in found]) for name in names} if found else None
