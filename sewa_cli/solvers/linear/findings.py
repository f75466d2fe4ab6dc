"""What the linear solver has found out, as the report tells it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sewa_cli.report.select import BudgetOption, ResampledGain, StabilityReport
from sewa_cli.solvers.chosen import Chosen
from sewa_cli.text import finite


def details_of(chosen: Chosen) -> dict[str, Any] | None:
    if chosen.cache is None:
        return None
    return {
        "rounds": [asdict(found) for found in chosen.rounds],
        "cache": asdict(chosen.cache),
        "surrogate_error": chosen.surrogate_error,
        "exact_swaps": chosen.swaps_tried,
    }


def budget_part(chosen: Chosen) -> list[BudgetOption] | None:
    if chosen.budget is None:
        return None
    return [
        BudgetOption(
            name=option.name,
            K=option.K,
            loss=finite(option.loss),
            behind=finite(option.behind),
            error=finite(option.error),
            chosen=i == chosen.budget.chosen,
        )
        for i, option in enumerate(chosen.budget.options)
    ]


def stability_part(chosen: Chosen) -> StabilityReport | None:
    found = chosen.stability
    if found is None:
        return None
    return StabilityReport(
        resamples=found.resamples,
        gains={name: ResampledGain(**asdict(gain)) for name, gain in found.gains.items()},
        rows=found.rows,
        rows_needed=found.rows_needed,
    )
