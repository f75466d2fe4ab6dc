"""How much of a choice is luck: the selection rows are drawn again, and the choice made anew.

Each resample draws as many rows as there are, with repetition, chooses K checkpoints on them, and
is evaluated on the rows it has not drawn: its gain there over a simple average is what choosing is
worth on new data. Half as many rows say how that grows with their number: the loss is taken as
L(n) = a + b/n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from statistics import fmean

import torch
from torch import Tensor

from sewa_cli.report.select import ResampledGain, StabilityReport
from sewa_cli.solvers import Problem, mask
from sewa_cli.solvers.linear import relax
from sewa_cli.solvers.linear.relax import Solution
from sewa_cli.solvers.linear.surrogate import Surrogate
from sewa_cli.solvers.linear.units import Units

QUICKLY = 250_000  # numbers for each checkpoint; of more, there are fewer resamples, 5 at least
FEWEST = 20  # rows; fewer cannot be resampled
QUICK = 20  # gradients of a resample, which begins at the answer on all rows


@dataclass(frozen=True)
class Stability:
    report: StabilityReport
    frequencies: list[float]  # of each checkpoint: the share of resamples that chose it
    too_few: bool  # no gain over `uniform`, neither with as many rows as there are nor with half


def resample(
    surrogate: Surrogate,
    found: Solution,
    simple: Mapping[str, Tensor],
    offset: float,
    most: int,
    problem: Problem,
) -> Stability | None:
    """`found`: the choice on all rows. `most`: resamples.

    `simple`: name → true outputs [O] of simple averages, `uniform` among them.

    `offset`: how far the true loss of what was chosen lies above the predicted one; predicted
    losses of the resamples' choices are taken to be as far off.

    None if the rows are too few, or the loss does not split into rows.
    """
    units, K = Units(surrogate.outputs, surrogate.base), len(found.selected)
    n = len(units)
    if n < FEWEST or not units.by_row:
        return None
    generator = torch.Generator().manual_seed(problem.seed)
    # by size, not by the clock: the same seed gives the same answer
    resamples = max(min(most, 5), most * QUICKLY // max(QUICKLY, surrogate.size.numbers))
    sizes = [n, n // 2] * resamples  # rows drawn
    times = torch.stack(
        [
            torch.bincount(torch.randint(n, (size,), generator=generator), minlength=n)
            for size in sizes
        ]
    )
    chosen: list[list[int]] = []
    for some in torch.split(times, units.side_by_side(surrogate)):
        gradient = units.gradient_on(surrogate, some, problem.room - surrogate.size.bytes)
        s = relax.relax_together(gradient, K, found.relaxed.expand(len(some), -1), QUICK)
        chosen += [mask.largest(one, K) for one in s]
        problem.events.progress("resampling", len(chosen), len(sizes))
    simple_losses = {name: units.losses(true) for name, true in simple.items()}
    chosen_count = torch.zeros(surrogate.k, dtype=torch.float64)
    gains: dict[str, list[float]] = {name: [] for name in simple}
    excess: dict[int, list[float]] = {n: [], n // 2: []}  # rows drawn → loss above `uniform`
    for size, drawn, ones in zip(sizes, times, chosen, strict=True):
        unseen = drawn == 0
        loss = surrogate.on(unseen).loss_of_mean(ones) + offset
        gained = {
            name: float(losses[unseen].mean()) - loss for name, losses in simple_losses.items()
        }
        excess[size].append(-gained["uniform"])
        if size == n:
            chosen_count[ones] += 1
            for name in simple:
                gains[name].append(gained[name])
    report = StabilityReport(
        resamples=resamples,
        gains={name: _gain(values) for name, values in gains.items()},
        rows=n,
        rows_needed=_rows_needed(n, *(fmean(values) for values in excess.values())),
    )
    too_few = min(sum(values) for values in excess.values()) > 0
    return Stability(report, (chosen_count / resamples).tolist(), too_few)


def most_frequent(stability: Stability, found: Solution) -> list[int]:
    """The K that were chosen most often; among equals, those with the larger s."""
    often = torch.tensor(stability.frequencies) + 1e-6 * found.relaxed
    return mask.largest(often, len(found.selected))


def _gain(values: list[float]) -> ResampledGain:
    tensor = torch.tensor(values, dtype=torch.float64)
    low, high = tensor.quantile(0.025), tensor.quantile(0.975)
    return ResampledGain(mean=float(tensor.mean()), low=float(low), high=float(high))


def _rows_needed(n: int, at_n: float, at_half: float) -> int | None:
    """Where a + b/n reaches the loss of the mean of all, by the mean excess at n and at n/2."""
    growth = max(at_half - at_n, 0.0)  # b/n
    limit = at_n - growth  # a: with rows without end
    if limit >= 0:
        return None
    needed = growth / -limit * n if growth > 0 else 1
    return ceil(needed) if needed < inf else None
