"""What the linear solver takes, before any work: passes, reads, bytes, and its own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from sewa_cli.events import Events
from sewa_cli.settings import AUTO
from sewa_cli.solvers import Cost, Problem, Sizes
from sewa_cli.solvers.crossvalidate import grid, simple_averages
from sewa_cli.solvers.linear.build import build, least, usual
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.solvers.linear.survey import QUARTERS
from sewa_cli.solvers.stability import QUICK
from sewa_cli.trajectory.dense import ROWS, Dense

if TYPE_CHECKING:
    from sewa_cli.solvers.linear.rounds import Linear

TYPICAL = 50  # iterations of projected gradient, of which each takes about two losses


def cost(settings: Linear.Settings, sizes: Sizes) -> Cost:
    """Scouting, surveying, once more around what was found, and true weights in the end."""
    k, B = sizes.k, sizes.batches
    is_auto = sizes.K == AUTO
    K = grid(k)[-1] if is_auto else sizes.K
    quarters = len({i * QUARTERS // k for i in range(k)})
    forward = B * (1 + (quarters if quarters > 1 else 0))
    forward += settings.rounds * (2 + k) * B
    forward += B * (1 + settings.stable)
    forward += 2 * B * (1 + (settings.bootstrap > 0))
    reads = k + settings.rounds * k + (settings.rounds - 1) * K + K * (1 + settings.stable)
    extra = 2
    if is_auto:
        forward += len(simple_averages(k)) * B
        extra += len(simple_averages(k))
        reads += K  # lawa, whose K was not known in time
    probe = _probe(sizes)
    numbers = probe.size.numbers * sizes.rows // probe.size.rows
    fits = least(k, numbers, extra) <= sizes.room and numbers <= settings.outputs
    if not fits:  # counted, and found too large: a pass more for each round, on the rows that fit
        forward += (settings.rounds + 4) * B
        reads += 2 * K
    return Cost(
        forward=forward,
        reads=reads,
        bytes=usual(k, min(numbers, settings.outputs), sizes.room, extra),
        seconds=_seconds(settings, sizes, probe),
        at_most=is_auto or not fits,
    )


def _seconds(settings: Linear.Settings, sizes: Sizes, probe: Surrogate) -> float:
    """From one loss in output space, and one mixture."""
    start = perf_counter()
    probe.loss_and_gradient(torch.full((2,), 1 / 2, dtype=torch.float64))
    in_outputs = perf_counter() - start
    wide = torch.empty(min(sizes.k, ROWS), probe.size.numbers)
    start = perf_counter()
    wide.sum(0)
    mixing = (perf_counter() - start) * sizes.k / len(wide)
    evaluations = settings.rounds * 2 * TYPICAL + 4 * QUICK * settings.bootstrap
    if sizes.K == AUTO:
        evaluations += settings.folds * len(grid(sizes.k)) * 2 * TYPICAL
    return evaluations * sizes.batches * (in_outputs + 2 * mixing)


def _probe(sizes: Sizes) -> Surrogate:
    """A cache of one batch and two copies of the model's own weights, to be measured."""
    objective = replace(sizes.objective, selection=[next(sizes.objective.batches())])
    flat = objective.model.flat.clone()
    twice = Dense(flat.expand(2, -1), objective.model.layout)
    return build(Problem(objective, twice, room=2**40, seed=0, events=Events()), flat, h=1.0)
