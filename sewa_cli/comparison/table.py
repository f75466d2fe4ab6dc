"""Every method at every K over one set of checkpoints, before rows are compared with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sewa_cli.comparison.evaluator import Court, Judged, Meter
from sewa_cli.config import AUTO, Config
from sewa_cli.errors import ConfigError
from sewa_cli.events import Listener
from sewa_cli.methods import Call, Coefficients, mean_of
from sewa_cli.methods.proposing import parse_methods, propose, register_methods
from sewa_cli.report.compare import Row, RowCost
from sewa_cli.rng import seeded
from sewa_cli.text import finite

SMALL = 0.01  # of the loss: an error that nobody would act on


@dataclass(frozen=True)
class Draft:
    """A row before the rows are compared with each other."""

    label: str
    K: int | None
    draws: list[Coefficients]
    judged: list[Judged]
    cost: Meter
    predicted: float | None = None  # by the cache
    surrogate_error: float | None = None  # that, minus the true loss as it was mixed

    @property
    def name(self) -> str:
        return self.label + (f" K={self.K}" if self.K is not None else "")

    def row(self) -> Row:
        """What is known of it alone: no intervals, no mark."""
        losses = [j.heldout.mean for j in self.judged if j.heldout is not None]
        return Row(
            method=self.label,
            K=self.K,
            size=max(sum(c != 0 for c in coefficients) for coefficients in self.draws),
            coefficients=self.draws,
            selection_loss=_mean([j.selection_loss for j in self.judged]),
            predicted_loss=self.predicted,
            surrogate_error=self.surrogate_error,
            heldout_loss=_mean(list(losses)) if losses else None,
            interval=None,
            spread=finite(float(torch.tensor(losses).std())) if len(losses) > 1 else None,
            difference=None,
            difference_interval=None,
            mark=None,
            metrics=_mean_metrics([j.metrics for j in self.judged]),
            cost=RowCost(
                forward_passes=self.cost.forward,
                backward_passes=self.cost.backward,
                bytes_read=self.cost.bytes,
                seconds=self.cost.seconds,
            ),
        )


def parse_asked(config: Config, listener: Listener) -> tuple[list[Call], list[int]]:
    """The methods and the budgets that are to be compared."""
    register_methods(config, listener)
    if config.lora == "merged":
        raise ConfigError("lora: compare averages A and B apart; `select` and `average` can merge")
    calls = parse_methods(config.compare.methods)
    budgets = sorted(set(config.compare.K or (config.K,)))
    if AUTO in budgets and any(call.method.has_budget for call in calls):
        raise ConfigError("K: auto is for `sewa select`; name the K to compare: --K 5,10,20")
    return calls, budgets


def check_budgets(
    calls: Sequence[Call], budgets: Sequence[int], k: int, of: str = "checkpoints"
) -> None:
    """`sewa` must have something to choose; the others can take all there are."""
    for call in calls:
        most = k - 1 if call.method.name == "sewa" else k
        if call.method.has_budget and max(budgets) > most:
            raise ConfigError(
                f"K: {max(budgets)} of {k} {of} is too many for {call.label}; K must be at "
                f"most {most}"
            )


def make_drafts(
    court: Court, calls: Sequence[Call], budgets: Sequence[int], listener: Listener
) -> list[Draft]:
    asked = [(call, K) for call in calls for K in (budgets if call.method.has_budget else [None])]
    drafts = []
    for n, (call, K) in enumerate(asked, 1):
        court.begin_row()
        with seeded(court.run.seed):
            draws = propose(call, court.run, K)
        judged = [court.judge(coefficients) for coefficients in draws]
        cost = court.ledger.next_row()
        predicted = error = None
        if court.fast:
            predicted = _mean([court.predicted_loss(c) for c in draws])
            true = _mean([court.cached_loss(c) for c in draws])
            error = None if predicted is None or true is None else predicted - true
            court.ledger.next_row()  # our own curiosity is not the method's cost
        drafts.append(Draft(call.label, K, draws, judged, cost, predicted, error))
        listener.progress("comparing", n, len(asked))
    return drafts


def far_off(court: Court, calls: Sequence[Call], drafts: Sequence[Draft]) -> Iterator[str]:
    """Where a prediction is off by more than half of what the method has gained by it."""
    searching = {call.label for call in calls if call.method.needs_loss}
    uniform = court.selection_loss(mean_of(range(court.run.k), court.run.k))
    for draft in drafts:
        error, predicted = draft.surrogate_error, draft.predicted
        if draft.label not in searching or error is None or predicted is None:
            continue
        gained = uniform - (predicted - error)
        if abs(error) > max(abs(gained) / 2, SMALL * abs(uniform)):
            yield (
                f"{draft.name}: its predicted loss is off by {error:.3g}, and it gained "
                f"{gained:.3g} over the mean of all; run it without --fast"
            )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite(sum(known) / len(known)) if len(known) == len(values) and known else None


def _mean_metrics(
    metrics: Sequence[dict[str, float | None] | None],
) -> dict[str, float | None] | None:
    if not metrics or metrics[0] is None:
        return None
    names = dict.fromkeys(name for found in metrics for name in found or {})
    return {name: _mean([(found or {}).get(name) for found in metrics]) for name in names}
