"""Checkpoints stream past the model: their outputs go into a cache, sums of them on the way.

    scout     every checkpoint is read once: the mean of all, the newest, the best place to begin
    survey    every checkpoint is read once: its outputs go into the cache
    again     linearised at the average just found: it is read (K), then every checkpoint (k)

In memory are a few vectors of the model's size and the cache; `rounds` makes the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from sewa_cli.errors import CheckpointError, TaskError
from sewa_cli.methods import Coefficients, mean_of
from sewa_cli.methods.family import Name
from sewa_cli.objective.objective import Data
from sewa_cli.solvers import Problem
from sewa_cli.solvers.linear.build import USUAL, Keep, build, count, frame, settle
from sewa_cli.solvers.linear.surrogate import Surrogate

QUARTERS = 4
EXTRA = 2  # outputs that are kept beside the cache: of the newest checkpoint and the mean of all


@dataclass
class Scouted:
    """Where to linearise: the best of the mean of all and the means of the run's quarters."""

    base: Tensor  # [P]
    members: list[int]  # whose mean it is
    loss: float
    uniform: Tensor  # the mean of all, [P]
    uniform_loss: float
    last: Tensor  # the newest, [P]


class _Mean:
    """A mean that grows row by row."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._total: Tensor | None = None

    def add(self, i: int, row: Tensor) -> None:
        self._total = row.clone() if self._total is None else self._total.add_(row)
        self.members.append(i)

    def value(self) -> Tensor:
        assert self._total is not None
        return self._total / len(self.members)


def scout(
    checkpoints: Iterable[tuple[int, Tensor]], of: int, value: Callable[[Tensor], float]
) -> Scouted:
    """Read every checkpoint once; `of`: how many there are at most. `value`: flat [P] ↦ loss.

    Of a run that jumps between basins, the mean of all may lie in none of them.
    """
    everything, quarter = _Mean(), _Mean()
    last: Tensor | None = None
    found: tuple[float, list[int], Tensor] | None = None

    def consider(mean: _Mean) -> tuple[Tensor, float]:
        nonlocal found
        flat = mean.value()
        loss = value(flat)
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
    return Scouted(base, members, loss, uniform, uniform_loss, last)


class Survey:
    """The true things: outputs of all checkpoints around a base, outputs and losses of averages."""

    def __init__(
        self, problem: Problem, h: float, keep: Keep = USUAL, extra: int = EXTRA, held: int = 0
    ) -> None:
        """Settle the examples and read every checkpoint once.

        `h`: the step towards each checkpoint; `keep`: what of its outputs; `extra`: outputs that
        are kept beside the first cache, `held`: bytes of the room that are taken then.
        """
        self._h = h
        self._keep = keep
        self._extra = extra
        trajectory = problem.trajectory
        self.k = trajectory.k
        if self.k < 2:
            raise CheckpointError("only one checkpoint is whole; there is nothing to choose")
        self._held = held
        less = replace(problem, room=problem.room - held)
        settled, self._rows = settle(less, count(problem, keep), keep, extra)
        self._problem = replace(settled, room=problem.room)
        self.scouted = scout(trajectory.rows(), self.k, self._problem.objective.value)
        if not isfinite(self.scouted.loss):
            raise TaskError(
                "loss() is NaN or Inf on the selection data for every checkpoint average"
            )

    @property
    def examples(self) -> Data:
        """The selection data that take part."""
        return self._problem.objective.selection

    def first(
        self, wanted: Mapping[Name, Coefficients] = {}
    ) -> tuple[Surrogate, dict[Name, Tensor]]:
        """The cache around the scouted base; the averages wanted are summed up on the way."""
        sums: dict[Name, Tensor] = {}

        def add(i: int, row: Tensor) -> None:
            for key, coefficients in wanted.items():
                if coefficients[i] != 0:
                    total = sums.setdefault(key, torch.zeros_like(row))
                    total.add_(row, alpha=coefficients[i])

        problem = replace(self._problem, room=self._problem.room - self._held)
        return self._around(problem, self.scouted.base, self._extra, add), sums

    def around(self, flat: Tensor) -> Surrogate:
        """The cache around weights [P]."""
        return self._around(self._problem, flat, EXTRA)

    def _around(
        self,
        problem: Problem,
        flat: Tensor,
        extra: int,
        on_row: Callable[[int, Tensor], None] | None = None,
    ) -> Surrogate:
        framed = frame(problem, self._rows, flat, self._keep, around=True)
        return build(problem, flat, self._h, extra, on_row=on_row, framed=framed)

    def outputs(self, here: Surrogate, flat: Tensor) -> Tensor:
        """True ones, of weights [P]: a simple average may lie far from the base."""
        self._problem.objective.model.set(flat)
        return here.outputs.true_outputs()

    def mix(self, selected: Sequence[int]) -> Tensor:
        """The weights of their average [P]; valid until the next."""
        return self._problem.trajectory.mix_few(mean_of(selected, self.k))

    def loss_of_mean(self, selected: Sequence[int]) -> float:
        """The true selection loss of their average."""
        return self._problem.objective.value(self.mix(selected))
