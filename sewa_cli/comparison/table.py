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
from sewa_cli.extensions import propose, register_methods
from sewa_cli.methods import Coefficients, MethodCall, check_K, mean_of, parse
from sewa_cli.objective.units import Unit, UnitLosses, paired
from sewa_cli.opening import check_budget
from sewa_cli.placing import Setup
from sewa_cli.report.kinds import ComparedRow, Judged, RowContest, RowCost, RowScore
from sewa_cli.report.shared import Interval
from sewa_cli.rng import seeded
from sewa_cli.scores import Scored
from sewa_cli.scoring.heldout import fill_failures
from sewa_cli.settings import USUAL
from sewa_cli.stats import FEWEST_UNITS, Spread, compare_rows
from sewa_cli.text import finite, with_K

SMALL = 0.01  # of the loss: an error that nobody would act on


@dataclass(frozen=True)
class ComparisonPlan:
    """The methods and budgets that are to be compared."""

    calls: list[MethodCall]
    budgets: list[int]

    @classmethod
    def by(cls, config: Config, events: Events, *, has_loss: bool = True) -> ComparisonPlan:
        register_methods(config, events)
        if config.objective.metric and config.compare.fast:
            raise ConfigError("--fast: works by the loss; leave out --metric, or --fast")
        if config.lora == "merged":
            raise ConfigError("lora: compare averages A and B apart; leave out lora=merged")
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
        for call in self.calls:
            if call.method.has_budget:
                check_K(max(self.budgets), k, k - 1 if call.method.name == "sewa" else k)
        return self

    def rows(self) -> list[tuple[MethodCall, int | None]]:
        return [
            (call, K)
            for call in self.calls
            for K in (self.budgets if call.method.has_budget else [None])
        ]


@dataclass(frozen=True)
class Draft:
    """A method at one K, evaluated draw by draw, and not yet compared with the others."""

    label: str
    K: int | None
    draws: list[Coefficients]
    evaluated: list[Scored]
    heldout: list[UnitLosses | None]
    cost: RowCost
    contest: RowContest | None = None
    predicted: float | None = None  # selection loss, --fast
    true: float | None = None  # the same, measured
    failed: int = 0  # parts of a metric

    @property
    def error(self) -> float | None:
        known = self.predicted is not None and self.true is not None
        return (self.predicted or 0.0) - (self.true or 0.0) if known else None

    @property
    def means(self) -> list[float]:
        return [units.mean for units in self.heldout if units is not None]

    @property
    def units(self) -> UnitLosses | None:
        """Return held-out losses, the mean of all draws: one draw more is no other example."""
        found = [units for units in self.heldout if units is not None]
        if not found or not all(units.is_finite for units in found):
            return None
        by_row = [units.rows for units in found if units.rows is not None]
        return UnitLosses(
            torch.stack([units.batches for units in found]).mean(0),
            found[0].counts,
            torch.stack(by_row).mean(0) if len(by_row) == len(found) else None,
            groups=found[0].groups,
        )


def evaluate_all(setup: Setup, plan: ComparisonPlan) -> tuple[Evaluator, list[Draft]]:
    clock, events = setup.session.clock, setup.session.events
    with clock("read"):
        run = setup.place()
        check_budget(0, run.used)
        plan = plan.of(run.trajectory.k)
    rows, drafts = plan.rows(), []
    with clock("evaluate"):
        evaluator = open_evaluator(run, setup.solver)
    try:
        with clock("evaluate"):
            for call, K in events.over("comparing", rows, len(rows)):
                drafts.append(_draft(evaluator, call, K))
    except BaseException:  # out of memory: another evaluator begins again with its own workers
        evaluator.close()
        raise
    return evaluator, drafts


def _draft(evaluator: Evaluator, call: MethodCall, K: int | None) -> Draft:
    evaluator.begin_row()
    with seeded(evaluator.seed):
        draws = propose(call, evaluator.proposing(), K)
    evaluated = [evaluator.evaluate(coefficients) for coefficients in draws]
    cost = evaluator.scores.next_row()
    predicted = true = None
    if evaluator.survey is not None:
        predicted = _mean([evaluator.predicted_loss(c) for c in draws])
        true = _mean([finite(evaluator.selection_loss(c)) for c in draws])
        evaluator.scores.next_row()  # our own curiosity is not the method's cost
    heldout = [one.heldout for one in evaluated]
    found = call.label, K, draws, evaluated, heldout, cost, evaluator.contested
    return Draft(*found, predicted=predicted, true=true)


def far_off(evaluator: Evaluator, plan: ComparisonPlan, drafts: Sequence[Draft]) -> Iterator[str]:
    """Warn of predictions that are off by more than half of what the method has gained."""
    searching = {call.label for call in plan.calls if call.method.needs_loss}
    k = evaluator.run.trajectory.k
    uniform = evaluator.selection_loss(mean_of(range(k), k))
    for draft in drafts:
        error, true = draft.error, draft.true
        if draft.label not in searching or error is None or true is None:
            continue
        gained = uniform - true
        if abs(error) > max(abs(gained) / 2, SMALL * abs(uniform)):
            yield (
                f"{with_K(draft.label, draft.K)}: its predicted loss is off by {error:.3g}, and it "
                f"gained {gained:.3g} over the mean of all; run it without --fast"
            )


@dataclass(frozen=True)
class ComparedRows:
    """Rows compared with each other; `best`: the one with the lowest held-out loss."""

    rows: list[ComparedRow]
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
    """Compare by resampling held-out examples; `judged`: by a metric's scores of parts."""
    goal = judged.goal if judged else "min"
    if judged is not None:
        drafts, judged = _on_common_parts(drafts, judged)
    units = {i: found for i, draft in enumerate(drafts) if (found := draft.units) is not None}
    spread: Spread | None = None
    unit: Unit | Literal["parts"] | None = None
    best: int | None = None
    if units:
        losses, weights, unit = paired(list(units.values()))
        unit = unit if judged is None else "parts"
        if unit == "batches":
            events.warn("the loss does not split into examples, so whole batches are resampled")
        if len(weights) >= FEWEST_UNITS:
            spread = compare_rows(losses, weights, seed, samples, goal)
            best = list(units)[spread.best]
        else:  # the lowest is known, but nothing about its lead
            choose = min if goal == "min" else max
            best = choose(units, key=lambda i: _mean(drafts[i].means) or 0.0)
            events.warn(
                f"{len(weights)} held-out {'examples' if unit == 'rows' else unit} are too few for "
                f"intervals; {FEWEST_UNITS} are needed"
            )
    at = {draft: position for position, draft in enumerate(units)}
    rows = [
        _row(draft, spread, at.get(i), i == best, by_metric=judged is not None)
        for i, draft in enumerate(drafts)
    ]
    return ComparedRows(rows, best, unit, judged)


def _on_common_parts(drafts: Sequence[Draft], judged: Judged) -> tuple[list[Draft], Judged]:
    """Keep the parts that any row has a score for, and count those each has failed on."""
    units = [one for draft in drafts for one in draft.heldout if one is not None]
    values = torch.stack([one.batches for one in units])
    met = fill_failures(values, Criterion(judged.metric, judged.goal))
    counts = units[0].counts[met.kept]
    draws = iter(zip(met.scores, met.known, strict=True))
    changed = []
    for draft in drafts:
        mine = [next(draws) for _ in draft.draws]
        known = torch.stack([known for _, known in mine])
        # of what fails on every part there is nothing to show but that
        found = [UnitLosses(scores, counts, None) if known.any() else None for scores, _ in mine]
        failed = int((~known.all(dim=0)).sum())
        changed.append(replace(draft, heldout=found, failed=failed))
    about = {
        "parts": len(counts),
        "left_out": met.left_out,
        "failure_counts_as": finite(met.failure),
    }
    return changed, judged.model_copy(update=about)


def _row(
    draft: Draft, spread: Spread | None, position: int | None, is_best: bool, by_metric: bool
) -> ComparedRow:
    """Make a row; `position`: among the rows that were compared, if it is one of these."""
    interval = difference = difference_interval = score = None
    mark: Literal["best", "tie", "worse"] | None = None if spread is None else "worse"
    if spread is not None and position is not None:
        interval = _interval(spread.intervals[position])
        difference = spread.differences[position]
        difference_interval = _interval(spread.difference_intervals[position])
        is_tie = difference_interval.low <= 0
        mark = "best" if is_best else "tie" if is_tie else "worse"
    heldout = _mean(draft.means)
    if by_metric:
        score = RowScore(
            heldout=heldout,
            failed=draft.failed,
            interval=interval,
            behind=difference,
            behind_interval=difference_interval,
        )
        heldout = interval = difference = difference_interval = None
    return ComparedRow(
        method=draft.label,
        K=draft.K,
        size=max(sum(c != 0 for c in coefficients) for coefficients in draft.draws),
        coefficients=draft.draws,
        selection_loss=_mean([one.scores.selection_loss for one in draft.evaluated]),
        predicted_loss=draft.predicted,
        surrogate_error=draft.error,
        heldout_loss=heldout,
        interval=interval,
        spread=finite(float(torch.tensor(draft.means).std())) if len(draft.means) > 1 else None,
        difference=difference,
        difference_interval=difference_interval,
        mark=mark,
        score=score,
        contest=draft.contest,
        metrics=_mean_metrics([one.scores.metrics for one in draft.evaluated]),
        cost=draft.cost,
    )


def _interval(ends: tuple[float, float]) -> Interval:
    return Interval(low=ends[0], high=ends[1])


def _same_average(one: ComparedRow, two: ComparedRow) -> bool:
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
