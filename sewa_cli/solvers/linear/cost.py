"""What choosing in output space takes, before any work: passes, reads, bytes, arithmetic.

All is reckoned from one batch and its outputs (`Sizes`), of which a few rows are enough; on `meta`,
from their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sewa_cli.methods.family import family, grid, ladder
from sewa_cli.objective.classes import Targets
from sewa_cli.objective.observe import seconds_of
from sewa_cli.objective.tree import rows as rows_of
from sewa_cli.objective.tree import take_rows, tensors
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Cost, Sizes
from sewa_cli.solvers.crossvalidate import FOLD_ITERATIONS, PAIR_ITERATIONS
from sewa_cli.solvers.linear.build import FEWEST, LOOKED_AT, Keep, least, usual
from sewa_cli.solvers.linear.digest import PIECE, WORTHWHILE, Digest
from sewa_cli.solvers.linear.outputs import MIXINGS, Outputs
from sewa_cli.solvers.linear.pull import EVALUATIONS, STRENGTHS
from sewa_cli.solvers.linear.surrogate import Size, Surrogate
from sewa_cli.solvers.linear.survey import QUARTERS
from sewa_cli.solvers.linear.whole import ROWS_TOGETHER, TOGETHER, Part, Whole, flatten, shapes_of
from sewa_cli.trajectory import Layout
from sewa_cli.trajectory.dense import ROWS, Dense

if TYPE_CHECKING:
    from sewa_cli.solvers.aggregate.solver import Aggregate
    from sewa_cli.solvers.linear.rounds import Linear

# where checkpoints are fewer than these and their outputs digested, runs of the model are most of
# the work: the default then climbs so many rungs, and runs so many of the other simple averages
DEAR, SPARED_RUNGS, TRIED = 50, 6, 2
TYPICAL = 50  # gradients of a round, and besides each of them so many losses
VALUES = 2.5  # counted on the demo alone
SWAPS = 1.5  # times those that are tried before it is given up: a guess
USUAL_ROUNDS = 1.5  # of the default's, which needs one or two: a guess (the demo needs two)
TIMED_TOGETHER = 4  # mixtures
LARGEST_ROW = 2**22  # numbers: a row of more is not copied to be timed
SAMPLE = 2**18  # numbers of outputs that a loss is timed on, or a row of them
COPIES = 2  # of a piece of logits, while a digest is made of it
LEAST_VECTORS = 3  # moving averages that are held however little room there is


@dataclass(frozen=True)
class Space:
    """The rows that take part, and what is kept of their outputs."""

    numbers: int  # of all rows, for each checkpoint
    rows: int  # that take part
    kept: int  # numbers of these
    of_rows: int
    digest: Keep | None = None  # None: all outputs are kept

    @classmethod
    def of(cls, sizes: Sizes, keep: Keep, room: int, extra: int = 0) -> Space:
        """As `build.fit` will find them: at most so many numbers, and what fits the room.

        Rows are taken to be of one size.
        """
        is_digest = sizes.targets is not None and sizes.classes >= WORTHWHILE * keep.each
        if sizes.targets is not None and is_digest:
            numbers = sizes.targets * keep.each
        else:
            floats = [x for x in tensors(sizes.outputs()) if x.is_floating_point()]
            numbers = sum(x.numel() for x in floats) * sizes.rows // rows_of(sizes.batch)
        most, rows = keep.most_numbers(is_digest), sizes.rows
        if numbers > most and rows > FEWEST:
            rows = max(rows * most // numbers, FEWEST)
        if (needed := least(sizes.k, numbers * rows // sizes.rows, extra)) > room:
            rows = rows * max(room, 0) // needed
        kept = max(1, numbers * rows // sizes.rows)
        return cls(numbers, rows, kept, sizes.rows, keep if is_digest else None)

    @property
    def has_all_rows(self) -> bool:
        return self.rows == self.of_rows

    @property
    def too_few(self) -> bool:
        return self.rows < min(FEWEST, self.of_rows)

    def piece(self, sizes: Sizes) -> int:
        """Bytes that digesting takes beside a batch's own loss: copies of some of its logits."""
        if self.digest is None or sizes.targets is None:
            return 0
        a_batch = 4 * sizes.classes * ceil(sizes.targets / sizes.batches)
        return COPIES * min(a_batch, PIECE)


def cost(settings: Linear.Settings, sizes: Sizes) -> Cost:
    """Scouting, surveying, once more around what was found, and true weights in the end."""
    k, B = sizes.k, sizes.batches
    is_auto = sizes.K == AUTO
    K = grid(k)[-1] if is_auto else sizes.K
    quarters = len({i * QUARTERS // k for i in range(k)})
    simple = len(family(k, sizes.K)) - 2  # the newest and the mean of all are looked at anyway
    forward = B * (1 + (quarters if quarters > 1 else 0))
    forward += B + settings.rounds * (1 + k) * B
    forward += B + 4 * B + simple * B
    reads = k + settings.rounds * k + (settings.rounds - 1) * K + K
    extra = 2 + simple * is_auto
    sums = 4 * simple * sizes.P
    summed = sums <= sizes.room // 4
    room = sizes.room - sums * summed
    space = Space.of(sizes, Keep.of(settings, "linear"), room, extra)
    fits = space.has_all_rows
    if space.digest is not None:  # the targets are compared with the loss
        forward += settings.rounds * min(B, LOOKED_AT)
    if not fits:  # counted, found too large, and counted again
        forward += 2 * B
    if not summed:  # simple averages are run once more, in passes over the files
        forward, reads = forward + (simple + 2) * B, reads + (simple + 3) * k
    alone, together = (_Arithmetic(sizes, space, count) for count in (1, settings.folds))
    seconds = settings.rounds * TYPICAL * (alone.gradient + VALUES * alone.value) + alone.labels
    if is_auto:
        steps = (FOLD_ITERATIONS + 1) * together.gradient + SWAPS * settings.swaps * alone.loss
        pairs = settings.folds * (settings.folds - 1) // 2 * (PAIR_ITERATIONS + 1)
        seconds += len(grid(k)) * (settings.folds * steps + pairs * together.gradient)
    return Cost(
        forward=forward,
        reads=reads,
        bytes=usual(k, space.kept, room, extra),
        piece=space.piece(sizes),
        seconds=seconds,
        at_most=is_auto or not fits or not summed,
        rows=space.rows,
        too_few=space.too_few,
    )


def of_aggregate(settings: Aggregate.Settings, sizes: Sizes) -> Cost:
    """Climbing the ladder, surveying around it, the rest of the family, the answer's true loss."""
    k, B = sizes.k, sizes.batches
    rungs, problems = ladder(k), 1 + settings.folds * (settings.folds + 1) // 2
    others = sum(name not in rungs for name in family(k))
    keep, vector = Keep.of(settings, "aggregate"), 4 * sizes.P

    def held(averages: int) -> int:
        """Bytes of so many, where there is room for them."""
        return min(vector * averages, sizes.room // 2)

    run = len(rungs) + QUARTERS + others
    space = Space.of(sizes, keep, sizes.room - held(run))
    spares = space.digest is not None and k < DEAR
    if spares:
        fitting = max(LEAST_VECTORS, sizes.room // 4 // vector - QUARTERS)
        run = min(len(rungs), SPARED_RUNGS, fitting)
        space = Space.of(sizes, keep, sizes.room - held(run))
    vectors = held(run)
    again = len(family(k)) + 1 if vectors == sizes.room // 2 else 1  # for the references
    # some to find out how many rows fit, which digests are known without, and how many in the end
    fixed = run + (TRIED if spares else others)
    fixed += 12 if space.digest is None else 4
    looked_at = 0 if space.digest is None else 1 + min(B, LOOKED_AT)
    rounds = min(settings.rounds, USUAL_ROUNDS)
    arithmetic = _Arithmetic(sizes, space, together=problems)
    path = EVALUATIONS * arithmetic.gradient + arithmetic.by_row
    return Cost(
        forward=B * (fixed + settings.rounds * (k + 2)) + looked_at,
        reads=(1 + 2 * settings.rounds) * k + again * k + TRIED * k * spares,
        bytes=usual(k, space.kept, sizes.room) + max(vectors, LEAST_VECTORS * vector),
        piece=space.piece(sizes),
        seconds=rounds * problems * len(STRENGTHS) * path + arithmetic.labels,
        at_most=True,
        rows=space.rows,
        too_few=space.too_few,
        usual=(fixed + rounds * (k + 2)) / (fixed + settings.rounds * (k + 2)),
        knows_simple=spares,
    )


class _Arithmetic:
    """Seconds of losses and gradients in output space, by a few rows that are timed."""

    def __init__(self, sizes: Sizes, space: Space, together: int = 1) -> None:
        """`together`: mixtures that share a product with the cache."""
        self._sizes = sizes
        self._space = space
        self._together = min(together, TIMED_TOGETHER)
        self._few = min(sizes.k, ROWS)  # checkpoints in the caches that are timed
        self._per_row = max(1, space.numbers // sizes.rows)
        is_large = space.digest is None and self._per_row > LARGEST_ROW
        self._shapes_only = is_large or sizes.objective.model.device.type == "meta"

    @cached_property
    def gradient(self) -> float:
        """One mixture's loss and gradient."""
        if self._shapes_only:
            return self._space.kept * _number_seconds() + 2 * self._product(self._sizes.k)
        if self._together == 1:
            half = torch.full((self._few,), 1 / self._few, dtype=torch.float64)
            found = self._timed(lambda cache: cache.loss_and_gradient(half))
        else:
            C = torch.full((self._together, self._few), 1 / self._few, dtype=torch.float64)

            def work(cache: Surrogate) -> Tensor:
                by_row = cache.outputs.is_by_row
                units = sum(cache.outputs.counts) if by_row else len(cache.outputs.counts)
                return cache.gradients(C, cache.outputs.factors(torch.ones(len(C), units), by_row))

            found = self._timed(work)
        return found / self._together + 2 * self._product(self._sizes.k - self._few)

    @cached_property
    def value(self) -> float:
        """One mixture's loss."""
        if self._shapes_only:
            return self._space.kept * _number_seconds() / 2 + self._product(self._sizes.k)
        half = torch.full((self._few,), 1 / self._few, dtype=torch.float64)
        found = self._timed(lambda cache: cache.loss(cache.mix(half)))
        return found + self._product(self._sizes.k - self._few)

    @property
    def loss(self) -> float:
        """Of outputs that are mixed already."""
        return max(0.0, self.value - self._product(self._sizes.k))

    @property
    def by_row(self) -> float:
        """The losses of all rows of one mixture."""
        if self._shapes_only:
            return self.value
        found = self._timed(lambda cache: cache.outputs.unit_losses(cache.base))
        return found + self._product(self._sizes.k)

    @property
    def labels(self) -> float:
        """Three averages' losses of rows that are mixed up; a digest's are sums of what it has."""
        return 3 * (MIXINGS if self._space.digest is None else 1) * self.value

    def _timed(self, work: Callable[[Surrogate], object]) -> float:
        """For all rows that take part: so much for each call of the loss, so much for each row."""
        if self._space.digest is not None:  # in blocks, whatever the batches
            cache = self._surrogate(*self._digested(self._space.digest))
            return seconds_of(partial(work, cache)) * self._space.kept / cache.size.numbers
        many = max(1, min(rows_of(self._sizes.batch), SAMPLE // self._per_row))
        few = max(1, many // 4)
        caches = [self._surrogate(*self._whole(count)) for count in (few, many)]
        fast, slow = (seconds_of(partial(work, cache)) for cache in caches)
        each = max(0.0, slow - fast) / (many - few) if many > few else slow / many
        fixed = max(0.0, slow - each * many)
        rows = self._space.rows
        small = max(ceil(rows / ROWS_TOGETHER), ceil(self._space.kept / TOGETHER))
        calls = max(1, min(self._sizes.batches, rows, small))  # small batches are joined
        return calls * fixed + rows * each

    def _surrogate(self, outputs: Outputs, flat: Tensor) -> Surrogate:
        """As if every checkpoint gave the same outputs."""
        numbers, rows = len(flat), sum(outputs.counts)
        size = Size(numbers, "float32", 0, rows, rows)
        cache = Dense(flat.repeat(self._few, 1), Layout.of(numbers))
        return Surrogate(outputs, flat, cache, size)

    def _whole(self, count: int) -> tuple[Outputs, Tensor]:
        """Of so many rows of the batch."""
        sizes, n = self._sizes, rows_of(self._sizes.batch)
        outputs, batch = take_rows((sizes.outputs(), sizes.batch), n, torch.arange(count))
        flat = flatten(outputs)
        part = Part(batch, count, slice(0, len(flat)), shapes_of(outputs))
        return Whole(sizes.objective, [part], seed=0), flat

    def _digested(self, keep: Keep) -> tuple[Outputs, Tensor]:
        """A few targets, for which no model is run."""
        count = max(1, min(SAMPLE, self._space.kept) // keep.each)
        rows = max(1, min(count, count * self._space.rows // (self._space.kept // keep.each + 1)))
        device = self._sizes.objective.model.device
        where = torch.arange(count, device=device)
        targets = Targets(
            where=where,
            classes=torch.zeros_like(where),
            weights=torch.full_like(where, 1 / count, dtype=torch.float32),
            rows=where * rows // count,
            shape=(rows, count // rows),
        )
        digest = Digest.like(self._sizes.objective, rows, targets, keep.largest, keep.samples)
        return digest, torch.zeros(digest.numbers, device=device)

    def _product(self, checkpoints: int) -> float:
        """Of so many checkpoints' outputs with a mixture's weights: mixing, or pulling back."""
        numbers = SAMPLE  # however few there are: a small product is overhead, which is timed above
        device = self._sizes.objective.model.device
        device = torch.device("cpu") if device.type == "meta" else device
        cache = Dense(torch.zeros(self._few, numbers, device=device), Layout.of(numbers))
        C = torch.full((self._together, self._few), 1 / self._few, dtype=torch.float64)
        seconds = seconds_of(lambda: cache.mix(C)) / self._together
        return seconds * checkpoints / self._few * self._space.kept / numbers


@cache
def _number_seconds() -> float:
    """Of a cross-entropy and its gradient here, for each logit."""
    logits = torch.zeros(64, 4096, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long)

    def work() -> None:
        torch.autograd.backward(F.cross_entropy(logits, targets))

    return seconds_of(work) / logits.numel()
