"""Where to linearise: found in one pass over the checkpoints, which is needed for their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, isfinite

from torch import Tensor

QUARTERS = 4


@dataclass
class Scouted:
    """Where to linearise: the best of the mean of all and the means of the run's quarters."""

    base: Tensor  # [P]
    members: list[int]  # whose mean it is
    loss: float
    uniform: Tensor  # the mean of all, [P]
    uniform_loss: float
    last: Tensor  # the newest, [P]
    k: int


class _Mean:
    """A mean that grows row by row."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._total: Tensor | None = None

    def add(self, i: int, row: Tensor) -> None:
        self._total = row.clone() if self._total is None else self._total.add_(row)
        self.members.append(i)

    def value(self) -> Tensor:
        if self._total is None:
            raise ValueError("there are no checkpoints")
        return self._total / len(self.members)


def scout(
    checkpoints: Iterable[tuple[int, Tensor]], of: int, judge: Callable[[Tensor], float]
) -> Scouted:
    """Read every checkpoint once; `of`: how many there are at most. `judge`: flat [P] ↦ loss.

    Of a run that jumps between basins, the mean of all may lie in none of them.
    """
    everything, quarter = _Mean(), _Mean()
    last: Tensor | None = None
    found: tuple[float, list[int], Tensor] | None = None

    def consider(mean: _Mean) -> tuple[Tensor, float]:
        nonlocal found
        flat = mean.value()
        loss = judge(flat)
        if found is None or not loss >= found[0]:
            found = (loss if isfinite(loss) else inf, mean.members, flat)
        return flat, loss

    for i, row in checkpoints:
        if quarter.members and i * QUARTERS // of != quarter.members[0] * QUARTERS // of:
            consider(quarter)
            quarter = _Mean()
        quarter.add(i, row)
        everything.add(i, row)
        last = row.clone() if last is None else last.copy_(row)
    if len(quarter.members) < len(everything.members):
        consider(quarter)
    uniform, uniform_loss = consider(everything)
    assert found is not None
    assert last is not None
    loss, members, base = found
    k = len(everything.members)
    return Scouted(base, members, loss, uniform, uniform_loss, last, k)
