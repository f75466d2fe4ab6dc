"""How much of a choice is luck: the selection rows are drawn again, and the choice made anew.

Each resample draws as many rows as there are, with repetition, chooses K checkpoints on them, and
is judged on the rows it has not drawn: its gain there over a simple average is what choosing is
worth on new data. Half as many rows say how that grows with their number: the loss is taken as
L(n) = a + b/n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor

from sewa_cli.solvers import mask
from sewa_cli.solvers.linear import relax
from sewa_cli.solvers.linear.surrogate import Sample, Surrogate

QUICKLY = 250_000  # numbers for each checkpoint; of more, there are fewer resamples, 5 at least
FEWEST = 20  # rows; fewer cannot be resampled
QUICK = 10  # iterations of a resample, which begins at the answer on all rows


@dataclass(frozen=True)
class Gain:
    """How far the chosen average's loss lies below another's, over the resamples."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Stability:
    resamples: int
    frequencies: list[float]  # of each checkpoint: the share of resamples that chose it
    gains: dict[str, Gain]  # over each simple average, on rows not drawn
    rows: int
    rows_needed: int | None  # to gain over `uniform`; None: no number would do, by this estimate
    too_few: bool  # no gain over `uniform`, neither with as many rows as there are nor with half


def resample(
    surrogate: Surrogate,
    K: int,
    most: int,
    relaxed: Tensor,
    simple: Mapping[str, Tensor],
    offset: float = 0.0,
    seed: int = 0,
    on_resample: Callable[[int], None] | None = None,
) -> Stability | None:
    """`most`: resamples. `relaxed`: s [k] on all rows.

    `simple`: name → true outputs [O] of simple averages, `uniform` among them.

    `offset`: how far the true loss of what was chosen lies above the predicted one; predicted
    losses of the resamples' choices are taken to be as far off.

    None if the rows are too few, or the loss does not split into rows.
    """
    n = sum(surrogate.counts)
    if n < FEWEST or not surrogate.splits():
        return None
    generator = torch.Generator().manual_seed(seed)
    chosen_count = torch.zeros(surrogate.k, dtype=torch.float64)
    gains: dict[str, list[float]] = {name: [] for name in simple}
    losses: dict[int, list[float]] = {n: [], n // 2: []}  # rows drawn → losses on the others
    uniform: dict[int, list[float]] = {n: [], n // 2: []}
    # by size, not by the clock: the same seed gives the same answer
    resamples = max(
        min(most, 5),
        most * QUICKLY // max(QUICKLY, surrogate.size.numbers),
    )
    for number in range(resamples):
        for size in losses:
            drawn = torch.randint(n, (size,), generator=generator)
            inside, outside = _samples(surrogate, drawn, n)
            s, _ = relax.relax(surrogate, K, relaxed, QUICK, inside)
            chosen = mask.largest(s, K)
            outputs = surrogate.mix(relax.mean(chosen, surrogate.k))
            loss = surrogate.loss(outputs, outside) + offset
            losses[size].append(loss)
            uniform[size].append(surrogate.loss(simple["uniform"], outside))
            if size == n:
                chosen_count[chosen] += 1
                for name, true in simple.items():
                    gains[name].append(surrogate.loss(true, outside) - loss)
        if on_resample is not None:
            on_resample(number)
    lead = [sum(losses[size]) - sum(uniform[size]) for size in losses]
    return Stability(
        resamples=resamples,
        frequencies=(chosen_count / resamples).tolist(),
        gains={name: _gain(values) for name, values in gains.items()},
        rows=n,
        rows_needed=_rows_needed(n, losses, uniform),
        too_few=min(lead) > 0,
    )


def most_frequent(stability: Stability, relaxed: Tensor, K: int) -> list[int]:
    """The K that were chosen most often; among equals, those with the larger s."""
    return mask.largest(torch.tensor(stability.frequencies) + 1e-6 * relaxed, K)


def _samples(surrogate: Surrogate, drawn: Tensor, n: int) -> tuple[Sample, Sample]:
    """The drawn rows, each as often as it was drawn; and all others."""
    times = torch.bincount(drawn, minlength=n)
    parts = torch.split(times, surrogate.counts)
    inside = [torch.arange(len(part)).repeat_interleave(part) for part in parts]
    outside = [(part == 0).nonzero().reshape(-1) for part in parts]
    return surrogate.sample(inside), surrogate.sample(outside)


def _gain(values: list[float]) -> Gain:
    tensor = torch.tensor(values, dtype=torch.float64)
    low, high = tensor.quantile(0.025), tensor.quantile(0.975)
    return Gain(float(tensor.mean()), float(low), float(high))


def _rows_needed(
    n: int, losses: Mapping[int, list[float]], uniform: Mapping[int, list[float]]
) -> int | None:
    """Where a + b/n reaches the loss of the mean of all, by the losses at n and at n/2."""
    excess = {
        size: float((torch.tensor(losses[size]) - torch.tensor(uniform[size])).mean())
        for size in losses
    }
    at_n, at_half = excess[n], excess[n // 2]
    growth = max(at_half - at_n, 0.0)  # b/n
    limit = at_n - growth  # a: with rows without end
    if limit >= 0:
        return None
    needed = growth / -limit * n if growth > 0 else 1
    return ceil(needed) if needed < inf else None
