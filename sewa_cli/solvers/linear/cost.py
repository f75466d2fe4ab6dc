"""What choosing in output space takes, before any work: passes, reads, bytes, arithmetic.

All is reckoned from one batch and its outputs (`Sizes`), of which a few rows are enough; on `meta`,
from their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
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

TYPICAL = 50  # iterations of projected gradient, of which each takes about two losses
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
    evaluations = settings.rounds * 2 * TYPICAL + 4 * QUICK * resamples
    if is_auto:
        evaluations += settings.folds * len(grid(k)) * 2 * TYPICAL
    alone = _Arithmetic(sizes, space, together=1)
    return Cost(
        forward=forward,
        reads=reads,
        bytes=usual(k, space.kept, room, extra),
        seconds=evaluations * alone.evaluation + alone.labels,
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
    path = problems * len(STRENGTHS) * EVALUATIONS
    fixed = 12 + len(rungs) + QUARTERS + others * 2
    many = _Arithmetic(sizes, space, together=problems)
    return Cost(
        # some to find out how many rows fit, and how many of them in the end
        forward=B * (fixed + settings.rounds * (k + 2)),
        reads=(1 + 2 * settings.rounds) * k + again * k,
        bytes=usual(k, space.kept, sizes.room) + held,
        seconds=path * many.evaluation + many.labels,
        at_most=True,
        rows=space.rows,
        usual=(fixed - 6 + k + 2) / (fixed + settings.rounds * (k + 2)),  # most need one round
    )


class _Arithmetic:
    """Seconds of losses and gradients in output space, by a few rows that are timed."""

    def __init__(self, sizes: Sizes, space: Space, together: int) -> None:
        """`together`: mixtures that share a product with the cache."""
        self._sizes = sizes
        self._space = space
        self._together = together
        batches = min(sizes.batches, space.rows)
        small = max(ceil(space.rows / ROWS_TOGETHER), ceil(space.kept / TOGETHER))
        self._calls = max(1, min(batches, small))  # of the loss: small batches are joined
        self._loss = self._losses()

    @property
    def evaluation(self) -> float:
        """One loss and its gradient, with both products."""
        return self._loss + self._products()

    @property
    def labels(self) -> float:
        """Three averages' losses on rows that were mixed up; without a gradient."""
        return 3 * MIXINGS * self._loss / 2

    def _losses(self) -> float:
        if self._sizes.objective.model.device.type == "meta":
            return self._space.kept * _number_seconds()
        rows = rows_of(self._sizes.batch)
        per_row = max(1, kept_of(self._sizes) // rows)
        many = max(1, min(rows, SAMPLE // per_row))
        few = max(1, many // 4)
        slow, fast = self._call(many), self._call(few)
        each = max(0.0, (slow - fast) / max(1, many - few)) if many > few else slow / many
        fixed = max(0.0, slow - each * many)
        return self._calls * fixed + self._space.rows * each

    def _call(self, count: int) -> float:
        """Seconds of a loss and its gradient on so many rows."""
        sizes, n = self._sizes, rows_of(self._sizes.batch)
        outputs, batch = take_rows((sizes.outputs, sizes.batch), n, torch.arange(count))
        flat = flatten(outputs)
        part = Part(batch, count, slice(0, len(flat)), shapes_of(outputs))
        here = Outputs(sizes.objective, [part], seed=0)
        size = Size(len(flat), "float32", 0, count, count)
        layout = Layout({"y": slice(0, len(flat))}, {"y": (len(flat),)}, len(flat), len(flat))
        cached = Surrogate(here, flat, Dense(torch.stack([flat, flat]), layout), size)
        half = torch.full((2,), 1 / 2, dtype=torch.float64)
        return seconds_of(lambda: cached.loss_and_gradient(half))

    def _products(self) -> float:
        """Mixing all checkpoints' outputs, and pulling back: for each of the mixtures."""
        few, numbers = min(self._sizes.k, ROWS), min(self._space.kept, SAMPLE)
        layout = Layout({"y": slice(0, numbers)}, {"y": (numbers,)}, numbers, numbers)
        device = self._sizes.objective.model.device
        device = torch.device("cpu") if device.type == "meta" else device
        cache = Dense(torch.zeros(few, numbers, device=device), layout)
        C = torch.full((self._together, few), 1 / few, dtype=torch.float64)
        seconds = seconds_of(lambda: cache.pull_back(cache.mix(C)))
        return seconds * self._sizes.k / few * self._space.kept / numbers / self._together


@cache
def _number_seconds() -> float:
    """Of a cross-entropy and its gradient here, for each logit."""
    logits = torch.zeros(64, 4096, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long)

    def work() -> None:
        F.cross_entropy(logits, targets).backward()

    return seconds_of(work) / logits.numel()
