"""Losses of single rows, where the user's loss is a mean over rows; of whole batches else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sewa_cli.objective.memo import Tensors, are_numbers, number
from sewa_cli.objective.tree import WALK, change, has_other_rows, has_rows, take_rows, tensors

METRIC = "metric "  # before a metric's name, in a memo


@dataclass(frozen=True)
class UnitLosses:
    """Losses of whole batches [b] and the rows in each [b]; of single rows [n] where they split.

    metrics: what the task makes of all targets, from the same pass.
    """

    batches: Tensor
    counts: Tensor
    rows: Tensor | None
    metrics: Mapping[str, float] | None = None

    @property
    def mean(self) -> float:
        return float(self.batches @ self.counts / self.counts.sum())

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.batches).all())

    def tensors(self) -> Tensors:
        """For a memo; `of` is the way back."""
        found = {"batches": self.batches, "counts": self.counts}
        found |= {} if self.rows is None else {"rows": self.rows}
        return found | {METRIC + name: number(x) for name, x in (self.metrics or {}).items()}

    @classmethod
    def of(cls, found: Tensors) -> UnitLosses:
        metrics = {
            name.removeprefix(METRIC): float(value)
            for name, value in found.items()
            if name.startswith(METRIC)
        }
        return cls(found["batches"], found["counts"], found.get("rows"), metrics or None)

    @classmethod
    def fits(cls, found: Tensors) -> bool:
        batches, counts, rows = (found.get(name) for name in ("batches", "counts", "rows"))
        if batches is None or counts is None or batches.shape != counts.shape or counts.ndim != 1:
            return False
        metrics = {name: value for name, value in found.items() if name.startswith(METRIC)}
        return are_numbers(metrics) and (rows is None or rows.shape == (int(counts.sum()),))


def are_parts(rows: Tensor, loss: Tensor) -> bool:
    """Whether losses of single rows make up the batch's: their mean is it, and they see the rows.

    A loss that was computed before it was split (in the model itself, say) is the same for each.
    """
    if not torch.allclose(rows.mean(), loss, rtol=1e-4, atol=1e-6, equal_nan=True):
        return False
    return len(rows) == 1 or not bool(torch.isfinite(loss)) or not bool((rows == rows[0]).all())


def row_losses(
    loss: Callable[[Any, Any], Tensor], outputs: Any, batch: Any, n: int
) -> Tensor | None:
    """loss(outputs, batch) of each of the n rows alone, [n] float64; None if it cannot be split."""
    if not any(has_rows(x, n) for x in tensors(outputs)):  # none of the outputs belongs to a row
        return None
    by_row = [x for x in tensors((outputs, batch)) if has_rows(x, n)]

    def one(*parts: Tensor) -> Tensor:
        left = iter(parts)
        single = change((outputs, batch), lambda x: next(left)[None] if has_rows(x, n) else WALK)
        return loss(*single).reshape(())

    # in one go where the user's loss allows it; row by row is slow, but takes any loss. Copies:
    # what one attempt has changed in place, the next would see
    if not has_other_rows((outputs, batch), n):
        with suppress(Exception):
            together: Tensor = torch.func.vmap(one)(*(x.clone() for x in by_row))
            return together.cpu().double()  # MPS has no float64
    with suppress(Exception):  # whatever the user's loss makes of a single row
        each = (take_rows((outputs, batch), n, torch.tensor([i])) for i in range(n))
        return torch.stack([loss(*row).reshape(()) for row in each]).cpu().double()
    return None
