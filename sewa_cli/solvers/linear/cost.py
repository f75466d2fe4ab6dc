"""What choosing in output space takes, before any work: passes, reads, bytes, arithmetic."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from sewa_cli.events import Events
from sewa_cli.methods.family import family, grid, ladder
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Cost, Problem, Sizes
from sewa_cli.solvers.linear.build import (
    FEWEST,
    LOOKED_AT,
    Keep,
    Linearising,
    build,
    least,
    usual,
)
from sewa_cli.solvers.linear.digest import Digest
from sewa_cli.solvers.linear.outputs import ROWS_TOGETHER
from sewa_cli.solvers.linear.pull import EVALUATIONS, STRENGTHS
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.solvers.linear.survey import QUARTERS
from sewa_cli.solvers.stability import QUICK
from sewa_cli.trajectory.dense import ROWS, Dense

if TYPE_CHECKING:
    from sewa_cli.solvers.aggregate.solver import Aggregate
    from sewa_cli.solvers.linear.rounds import Linear

# of the simple averages that are no rungs, so many are run by the default where checkpoints are
# fewer than these and their outputs digested: then, runs of the model are most of the work
TRIED, DEAR = 2, 50
TYPICAL = 50  # iterations of projected gradient, of which each takes about two losses


def cost(settings: Linear.Settings, sizes: Sizes) -> Cost:
    """Scouting, surveying, once more around what was found, and true weights in the end."""
    k, B = sizes.k, sizes.batches
    is_auto = sizes.K == AUTO
    K = grid(k)[-1] if is_auto else sizes.K
    quarters = len({i * QUARTERS // k for i in range(k)})
    simple = len(family(k)) - 2  # the newest and the mean of all are looked at anyway
    forward = B * (1 + (quarters if quarters > 1 else 0))
    forward += B + settings.rounds * (1 + k) * B
    forward += B * (1 + settings.stable)
    forward += 2 * B * (2 + (settings.bootstrap > 0)) + simple * B
    reads = k + settings.rounds * k + (settings.rounds - 1) * K + K * (1 + settings.stable)
    extra = 2 + simple * is_auto
    probe = _probe(settings, sizes)
    is_digest = isinstance(probe.outputs, Digest)
    forward += settings.rounds * min(B, LOOKED_AT) * is_digest
    numbers = probe.size.numbers * sizes.rows // probe.size.rows
    most = Keep.of(settings, "linear").most_numbers(is_digest)
    sums = 4 * simple * sizes.objective.model.layout.size
    summed = sums <= sizes.room // 4
    room = sizes.room - sums * summed
    fits = least(k, numbers, extra) <= room and numbers <= most
    if not fits:  # counted, and found too large: a pass more for each round, on the rows that fit
        forward += (settings.rounds + 6) * B
        reads += 2 * K
    if not (fits and summed):  # simple averages are run once more, in passes over the files
        forward, reads = forward + (simple + 2) * B, reads + (simple + 3) * k
    evaluations = settings.rounds * 2 * TYPICAL + 4 * QUICK * settings.bootstrap
    if is_auto:
        evaluations += settings.folds * len(grid(k)) * 2 * TYPICAL
    return Cost(
        forward=forward,
        reads=reads,
        bytes=usual(k, min(numbers, most), room, extra),
        seconds=evaluations * _evaluation(sizes, probe),
        at_most=is_auto or not fits or not summed,
    )


def of_aggregate(settings: Aggregate.Settings, sizes: Sizes) -> Cost:
    """Climbing the ladder, surveying around it, the rest of the family, the answer's true loss."""
    k, B = sizes.k, sizes.batches
    rungs, problems = ladder(k), 1 + settings.folds * (settings.folds + 1) // 2
    others = sum(name not in rungs for name in family(k))
    probe = _probe(settings, sizes)
    is_digest = isinstance(probe.outputs, Digest)
    run, summed = (TRIED, 0) if is_digest and k < DEAR else (others * 2, others)
    vectors = 4 * sizes.objective.model.layout.size * (len(rungs) + QUARTERS + summed)
    most = Keep.of(settings, "aggregate").most_numbers(is_digest)
    numbers = min(probe.size.numbers * sizes.rows // probe.size.rows, most)
    tight = vectors > sizes.room // 2 or least(k, numbers, 0) > sizes.room - vectors
    again = len(family(k)) + 1 if tight or numbers == most else 1  # for the references
    path = problems * len(STRENGTHS) * EVALUATIONS
    return Cost(
        # some to find out how many rows fit, and how many of them in the end
        forward=B * (12 + len(rungs) + QUARTERS + run + settings.rounds * (k + 2)),
        reads=(1 + 2 * settings.rounds) * k + again * k + TRIED * k * is_digest,
        bytes=usual(k, numbers, sizes.room) + min(vectors, sizes.room // 2),
        seconds=path * _side_by_side(sizes, probe),  # most runs need one round
        at_most=True,
    )


def _side_by_side(sizes: Sizes, probe: Surrogate) -> float:
    """Seconds of one loss and gradient among many, which share the products with the cache."""
    together = 4
    C = torch.full((together, 2), 1 / 2, dtype=torch.float64)
    shares = torch.full((together, sum(probe.outputs.counts)), 1.0)
    factors = probe.outputs.factors(shares, by_row=probe.outputs.is_by_row)
    seconds = inf
    for _ in range(3):  # the first pays for what is imported and allocated
        start = perf_counter()
        probe.gradients(C, factors)
        seconds = min(seconds, perf_counter() - start)
    calls = min(sizes.batches, ceil(sizes.rows / ROWS_TOGETHER))  # small batches are joined
    return calls * seconds / together


def _evaluation(sizes: Sizes, probe: Surrogate) -> float:
    """Seconds of one loss and gradient in output space: one is timed, and one mixture."""
    in_outputs = inf
    for _ in range(3):  # the first pays for what is imported and allocated
        start = perf_counter()
        probe.loss_and_gradient(torch.full((2,), 1 / 2, dtype=torch.float64))
        in_outputs = min(in_outputs, perf_counter() - start)
    wide = torch.empty(min(sizes.k, ROWS), probe.size.numbers)
    start = perf_counter()
    wide.sum(0)
    mixing = (perf_counter() - start) * sizes.k / len(wide)
    return sizes.batches * (in_outputs + 2 * mixing)


def _probe(settings: Linearising, sizes: Sizes) -> Surrogate:
    """A cache of one batch and two copies of the model's own weights, to be measured."""
    objective = replace(sizes.objective, selection=[next(sizes.objective.batches())])
    flat = objective.model.flat.clone()
    twice = Dense(flat.expand(2, -1), objective.model.layout)
    problem = Problem(objective, twice, room=2**40, seed=0, events=Events())
    keep = Keep(most=2**40, largest=settings.largest, samples=settings.samples)
    return build(problem, flat, h=1.0, keep=keep)


def rows_taking_part(
    k: int, numbers: int, of_rows: int, room: int, most: int, extra: int = 0
) -> int:
    """How many of the rows take part, from sizes alone; `numbers`: of all rows' outputs.

    Rows are taken to be of one size. If it is fewer than min(`build.FEWEST`, of_rows), it stops.
    `most`: as `Keep.most_numbers` has it.
    """
    found = of_rows
    if numbers > most and of_rows > FEWEST:
        found = max(of_rows * most // numbers, FEWEST)
    needed = least(k, numbers * found // of_rows, extra)
    return found if needed <= room else found * room // needed
