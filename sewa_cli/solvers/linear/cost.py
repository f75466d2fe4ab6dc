"""What choosing in output space takes, before any work: passes, reads, bytes, arithmetic.

All is reckoned from one batch and its outputs (`Sizes`), of which a few rows are enough; on `meta`,
from their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sewa_cli.methods.family import family, grid, ladder
from sewa_cli.objective.observe import seconds_of
from sewa_cli.objective.tree import rows as rows_of
from sewa_cli.objective.tree import take_rows, tensors
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Cost, Sizes
from sewa_cli.solvers.linear.build import FEWEST, least, usual
from sewa_cli.solvers.linear.outputs import (
    MIXINGS,
    ROWS_TOGETHER,
    TOGETHER,
    Outputs,
    Part,
    flatten,
    shapes_of,
)
from sewa_cli.solvers.linear.pull import EVALUATIONS, STRENGTHS
from sewa_cli.solvers.linear.surrogate import Size, Surrogate
from sewa_cli.solvers.linear.survey import QUARTERS
from sewa_cli.solvers.stability import QUICK, QUICKLY
from sewa_cli.trajectory import Layout
from sewa_cli.trajectory.dense import ROWS, Dense

if TYPE_CHECKING:
    from sewa_cli.solvers.aggregate.solver import Aggregate
    from sewa_cli.solvers.linear.rounds import Linear

TYPICAL = 50  # gradients of a round, and besides each of them so many losses
VALUES = 2.5  # counted on the demo alone
TYPICAL_OF_FOLDS = 25  # a guess
USUAL_ROUNDS = 1.5  # of the default's, which needs one or two: a guess (the demo needs two)
TIMED_TOGETHER = 4  # mixtures
LARGEST_ROW = 2**22  # numbers: a row of more is not copied to be timed
SAMPLE = 2**18  # numbers of outputs that a loss is timed on, or a row of them
LEAST_VECTORS = 3  # moving averages that are held however little room there is


def kept_of(sizes: Sizes) -> int:
    """Numbers that a cache keeps of the batch for each checkpoint: all of its outputs."""
    return sum(x.numel() for x in tensors(sizes.outputs) if x.is_floating_point())


@dataclass(frozen=True)
class Space:
    """The rows that take part, and their outputs."""

    numbers: int  # of all rows, for each checkpoint
    rows: int  # that take part
    kept: int  # numbers of these

    @classmethod
    def of(cls, sizes: Sizes, most: int, room: int, extra: int = 0) -> Space:
        """As `build.frame` will find them: at most so many numbers, and what fits the room."""
        numbers = kept_of(sizes) * sizes.rows // rows_of(sizes.batch)
        share = 1.0
        if numbers > most and sizes.rows > FEWEST:
            share = max(most / numbers, FEWEST / sizes.rows)
        if (needed := least(sizes.k, int(share * numbers), extra)) > room:
            share *= max(room, 1) / needed
        if share == 1:
            return cls(numbers, sizes.rows, numbers)
        rows = max(1, int(share * sizes.rows))
        return cls(numbers, rows, max(1, numbers * rows // sizes.rows))


def cost(settings: Linear.Settings, sizes: Sizes) -> Cost:
    """Scouting, surveying, once more around what was found, and true weights in the end."""
    k, B = sizes.k, sizes.batches
    is_auto = sizes.K == AUTO
    K = grid(k)[-1] if is_auto else sizes.K
    quarters = len({i * QUARTERS // k for i in range(k)})
    simple = len(family(k)) - 2  # the newest and the mean of all are looked at anyway
    forward = B * (1 + (quarters if quarters > 1 else 0))
    forward += settings.rounds * (2 + k) * B
    forward += B * (1 + settings.stable)
    forward += 2 * B * (2 + (settings.bootstrap > 0)) + simple * B
    reads = k + settings.rounds * k + (settings.rounds - 1) * K + K * (1 + settings.stable)
    extra = 2 + simple * is_auto
    sums = 4 * simple * sizes.objective.model.layout.size
    summed = sums <= sizes.room // 4
    room = sizes.room - sums * summed
    space = Space.of(sizes, settings.outputs, room, extra)
    fits = space.rows == sizes.rows
    if not fits:  # counted, and found too large: a pass more for each round, on the rows that fit
        forward += (settings.rounds + 4) * B
        reads += 2 * K
    if not (fits and summed):  # simple averages are run once more, in passes over the files
        forward, reads = forward + (simple + 2) * B, reads + (simple + 3) * k
    resamples = settings.bootstrap * QUICKLY // max(QUICKLY, space.kept)
    resamples = max(min(settings.bootstrap, 5), resamples)
    gradients = settings.rounds * TYPICAL + 2 * QUICK * resamples
    if is_auto:
        gradients += settings.folds * len(grid(k)) * TYPICAL_OF_FOLDS
    alone = _Arithmetic(sizes, space)
    value = alone.value
    return Cost(
        forward=forward,
        reads=reads,
        bytes=usual(k, space.kept, room, extra),
        seconds=gradients * (alone.gradient + VALUES * value) + 3 * MIXINGS * value,
        at_most=is_auto or not fits or not summed,
        rows=space.rows,
    )


def of_aggregate(settings: Aggregate.Settings, sizes: Sizes) -> Cost:
    """Climbing the ladder, surveying around it, the rest of the family, the answer's true loss."""
    k, B = sizes.k, sizes.batches
    rungs, problems = ladder(k), 1 + settings.folds * (settings.folds + 1) // 2
    others = sum(name not in rungs for name in family(k))
    vector = 4 * sizes.objective.model.layout.size
    vectors = vector * (len(rungs) + QUARTERS + others)
    held = max(min(vectors, sizes.room // 2), LEAST_VECTORS * vector)
    space = Space.of(sizes, settings.outputs, sizes.room - min(vectors, sizes.room // 2))
    tight = vectors > sizes.room // 2 or space.rows < sizes.rows
    again = len(family(k)) + 1 if tight else 1  # for the references
    path = len(STRENGTHS)
    fixed = 12 + len(rungs) + QUARTERS + others * 2
    rounds = min(settings.rounds, USUAL_ROUNDS)
    arithmetic = _Arithmetic(sizes, space, together=problems)
    weighing = problems * path * (EVALUATIONS * arithmetic.gradient + arithmetic.by_row)
    return Cost(
        # some to find out how many rows fit, and how many of them in the end
        forward=B * (fixed + settings.rounds * (k + 2)),
        reads=(1 + 2 * settings.rounds) * k + again * k,
        bytes=usual(k, space.kept, sizes.room) + held,
        seconds=rounds * weighing + 3 * MIXINGS * arithmetic.value,
        at_most=True,
        rows=space.rows,
        usual=(fixed + rounds * (k + 2)) / (fixed + settings.rounds * (k + 2)),
    )


class _Arithmetic:
    """Seconds of losses and gradients in output space, by a few rows that are timed."""

    def __init__(self, sizes: Sizes, space: Space, together: int = 1) -> None:
        """`together`: mixtures that share a product with the cache."""
        self._sizes = sizes
        self._space = space
        self._together = min(together, TIMED_TOGETHER)
        batches = min(sizes.batches, space.rows)
        small = max(ceil(space.rows / ROWS_TOGETHER), ceil(space.kept / TOGETHER))
        self._calls = max(1, min(batches, small))  # of the loss: small batches are joined
        self._few = min(sizes.k, ROWS)  # checkpoints in the caches that are timed
        self._per_row = max(1, kept_of(sizes) // rows_of(sizes.batch))
        self._shapes_only = (
            sizes.objective.model.device.type == "meta" or self._per_row > LARGEST_ROW
        )

    @property
    def gradient(self) -> float:
        """One mixture's loss and gradient."""
        if self._shapes_only:
            return self._space.kept * _number_seconds() + 2 * self._product(self._sizes.k)
        if self._together == 1:
            half = torch.full((self._few,), 1 / self._few, dtype=torch.float64)
            found = self._timed(lambda cache: cache.loss_and_gradient(half))
        else:
            C = torch.full((self._together, self._few), 1 / self._few, dtype=torch.float64)
            found = self._timed(
                lambda cache: cache.gradients(C, cache.base.new_ones(len(C), cache.numbers))
            )
        return found / self._together + 2 * self._product(self._sizes.k - self._few)

    @property
    def value(self) -> float:
        """One mixture's loss."""
        if self._shapes_only:
            return self._space.kept * _number_seconds() / 2 + self._product(self._sizes.k)
        half = torch.full((self._few,), 1 / self._few, dtype=torch.float64)
        found = self._timed(lambda cache: cache.loss(cache.mix(half)))
        return found + self._product(self._sizes.k - self._few)

    @property
    def by_row(self) -> float:
        """The losses of all rows of one mixture."""
        if self._shapes_only:
            return self.value
        found = self._timed(lambda cache: cache.unit_losses(cache.base))
        return found + self._product(self._sizes.k)

    def _timed(self, work: Callable[[Surrogate], object]) -> float:
        """For all rows that take part: so much for each call of the loss, so much for each row."""
        rows = rows_of(self._sizes.batch)
        many = max(1, min(rows, SAMPLE // self._per_row))
        few = max(1, many // 4)
        caches = [self._cache(count) for count in (few, many)]
        fast, slow = (seconds_of(partial(work, cache)) for cache in caches)
        each = max(0.0, slow - fast) / (many - few) if many > few else slow / many
        fixed = max(0.0, slow - each * many)
        return self._calls * fixed + self._space.rows * each

    def _cache(self, count: int) -> Surrogate:
        """Of so many rows of the batch, as if every checkpoint gave the same outputs."""
        sizes, n = self._sizes, rows_of(self._sizes.batch)
        outputs, batch = take_rows((sizes.outputs, sizes.batch), n, torch.arange(count))
        flat = flatten(outputs)
        part = Part(batch, count, slice(0, len(flat)), shapes_of(outputs))
        size = Size(len(flat), "float32", 0, count, count)
        cache = Dense(flat.repeat(self._few, 1), _layout(len(flat)))
        return Surrogate(Outputs(sizes.objective, [part], seed=0), flat, cache, size)

    def _product(self, checkpoints: int) -> float:
        """Of so many checkpoints' outputs with a mixture's weights: mixing, or pulling back."""
        numbers = SAMPLE  # however few there are: a small product is overhead, which is timed above
        device = self._sizes.objective.model.device
        device = torch.device("cpu") if device.type == "meta" else device
        cache = Dense(torch.zeros(self._few, numbers, device=device), _layout(numbers))
        C = torch.full((self._together, self._few), 1 / self._few, dtype=torch.float64)
        seconds = seconds_of(lambda: cache.mix(C)) / self._together
        return seconds * checkpoints / self._few * self._space.kept / numbers


def _layout(numbers: int) -> Layout:
    return Layout({"outputs": slice(0, numbers)}, {"outputs": (numbers,)}, numbers, numbers)


@cache
def _number_seconds() -> float:
    """Of a cross-entropy and its gradient here, for each logit."""
    logits = torch.zeros(64, 4096, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long)

    def work() -> None:
        torch.autograd.backward(F.cross_entropy(logits, targets))

    return seconds_of(work) / logits.numel()
