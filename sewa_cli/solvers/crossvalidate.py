"""K by cross-validation in output space: what would have been chosen, on rows it has not seen.

For each fold of the selection rows, masks of every size are learned on the other folds and judged
on this one, beside the simple averages, which learn nothing. Differences are paired by row, so
one standard error of a difference is a fair margin: within it of the best, a simple average is
taken before a learned one, and a larger K before a smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.solvers import LEARNED
from sewa_cli.solvers.linear import relax
from sewa_cli.solvers.linear.surrogate import Labels, Sample, Surrogate

Name = tuple[str, int | None]  # of an average, and its K
FOLD_ITERATIONS = 30  # each K begins where the one before it ended


@dataclass(frozen=True)
class Option:
    """One way to average: its cross-validated loss, and how far it is above the best."""

    name: str  # `learned`, or a simple average
    K: int | None
    loss: float
    behind: float  # mean over rows of its loss minus the best's
    error: float  # standard error of that mean


@dataclass(frozen=True)
class Budget:
    options: list[Option]
    chosen: int  # into options
    best: int
    units: int  # rows (or batches) that were judged
    labels: Labels  # `noise`: they say nothing, and the mean of all is taken


def grid(k: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … below k."""
    steps = (digit * 10**power for power in range(len(str(k))) for digit in (1, 2, 5))
    return [K for K in steps if k > K]


def choose_budget(
    surrogate: Surrogate,
    sizes: Sequence[int],
    simple: Mapping[Name, Tensor],
    weights_of: Mapping[Name, float],
    *,
    folds: int = 5,
    iterations: int = 100,
    tries: int = 50,
    seed: int = 0,
    on_fold: Callable[[int], None] | None = None,
) -> Budget:
    """`simple`: (name, K) → outputs [O] of an average that does not depend on the data.

    (`uniform`, None) must be among them. `weights_of`: how many checkpoints each is worth, 1/Σ c².
    """
    split = _folds(surrogate, folds, seed)
    iterations = min(iterations, FOLD_ITERATIONS)
    keys = [(LEARNED, K) for K in sizes]
    learned = torch.zeros(len(keys), split.units, dtype=torch.float64)
    for number in range(split.count):
        rest, here = split.without(number), split.places(number)
        relaxed: Tensor | None = None
        for position, K in enumerate(sizes):
            found = relax.solve(
                surrogate, K, iterations, tries, sample=rest, relaxed=relaxed, try_all=False
            )
            s = torch.tensor(found.probabilities, dtype=torch.float64)
            following = sizes[min(position + 1, len(sizes) - 1)]
            relaxed = s * following / K  # a good place to begin for the next K
            outputs = surrogate.mix(relax.mean(found.selected, surrogate.k))
            learned[position, here] = split.losses(outputs)[here]
        if on_fold is not None:
            on_fold(number)
    every = torch.cat([learned, torch.stack([split.losses(out) for out in simple.values()])])
    names: list[Name] = [*keys, *simple]
    sizes_of = [*sizes, *(weights_of[key] for key in simple)]
    decided = _decide(names, every, split.weights, sizes_of)
    if not split.by_row:
        return decided
    best_simple = min(simple, key=lambda key: decided.options[names.index(key)].loss)
    probed = {("uniform", None), ("last", None), best_simple}
    labels = surrogate.labels([out for key, out in simple.items() if key in probed], seed)
    if labels != "noise":
        return replace(decided, labels=labels)
    return replace(decided, chosen=names.index(("uniform", None)), labels=labels)


def _decide(
    names: Sequence[Name],
    losses: Tensor,
    weights: Tensor,
    sizes: Sequence[float],
) -> Budget:
    """losses [options, units], weights [units] (rows in each), sizes [options]."""
    share = weights / weights.sum()
    means = torch.nan_to_num(losses @ share, nan=torch.inf)
    best = int(means.argmin())
    differences = losses - losses[best]
    behind = differences @ share
    n = len(share)
    variance = ((differences - behind[:, None]) ** 2) @ share
    errors = (variance / max(n - 1, 1)).sqrt()
    options = [
        Option(name, K, float(means[i]), float(behind[i]), float(errors[i]))
        for i, (name, K) in enumerate(names)
    ]
    close = [i for i, o in enumerate(options) if i == best or o.behind <= o.error]
    simple = [i for i in close if options[i].name != LEARNED]
    chosen = max(simple or close, key=lambda i: (sizes[i], -options[i].loss))
    return Budget(options, chosen, best, n, labels="matter")


@dataclass
class _Folds:
    """Folds of the rows; of whole batches, if the loss does not split into rows."""

    surrogate: Surrogate
    count: int
    assigned: Tensor  # fold of each unit
    by_row: bool

    @property
    def units(self) -> int:
        return len(self.assigned)

    @property
    def weights(self) -> Tensor:
        counts = [1] * self.units if self.by_row else self.surrogate.counts
        return torch.tensor(counts, dtype=torch.float64)

    def places(self, fold: int) -> Tensor:
        return (self.assigned == fold).nonzero().reshape(-1)

    def without(self, fold: int) -> Sample:
        """All rows but the fold's."""
        if self.by_row:
            kept = torch.split(self.assigned != fold, self.surrogate.counts)
            return self.surrogate.sample([part.nonzero().reshape(-1) for part in kept])
        nothing = torch.arange(0)
        return self.surrogate.sample(
            [nothing if own == fold else None for own in self.assigned.tolist()]
        )

    def losses(self, outputs: Tensor) -> Tensor:
        """Of each unit, [units]."""
        if self.by_row:
            found = self.surrogate.unit_losses(outputs)
            if found is None:
                raise TaskError("loss() splits into rows at one average and not at another")
            return found
        return self.surrogate.batch_losses(outputs)


def _folds(surrogate: Surrogate, count: int, seed: int) -> _Folds:
    by_row = surrogate.splits() and surrogate.unit_losses(surrogate.base) is not None
    units = sum(surrogate.counts) if by_row else len(surrogate.counts)
    if units < count:
        what = "rows" if by_row else "batches (the loss does not split into rows)"
        raise TaskError(f"K: auto needs {count} or more selection {what}, found {units}")
    generator = torch.Generator().manual_seed(seed)
    return _Folds(surrogate, count, torch.randperm(units, generator=generator) % count, by_row)
