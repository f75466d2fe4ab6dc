"""K by cross-validation in output space: what would have been chosen, on rows it has not seen.

For each fold of the selection units, masks of every size are learned on the other folds and
evaluated on this one, beside the simple averages, which learn nothing. Differences are paired by
unit, so one standard error of a difference is a fair margin: within it of the best, a simple
average is taken before a learned one, and a larger K before a smaller.

What to expect of that is found with one fold more left out: masks without each two folds say what
would have been taken without the one, and that is judged on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.methods import Coefficients, Run, parse_one
from sewa_cli.methods.family import Name, grid
from sewa_cli.solvers import LEARNED, Problem, mask
from sewa_cli.solvers.linear import relax
from sewa_cli.solvers.linear.outputs import Labels
from sewa_cli.solvers.linear.surrogate import Surrogate, mean
from sewa_cli.solvers.linear.units import Units

if TYPE_CHECKING:
    from sewa_cli.solvers.linear.rounds import Linear

FOLD_ITERATIONS = 50  # each K begins where the one before it ended
PAIR_ITERATIONS = 15  # without swaps: these masks choose a K, and are never judged themselves


@dataclass(frozen=True)
class Option:
    """One way to average: its cross-validated loss, and how far it is above the best."""

    name: str  # `learned`, or a simple average
    K: int | None
    loss: float
    behind: float  # mean over rows of its loss minus the best's
    error: float  # standard error of that mean


@dataclass(frozen=True)
class Nested:
    """Losses [units] of what the other folds would have taken, and of their best simple average."""

    taken: Tensor
    is_learned: Tensor  # whether that was a mask, whose outputs are predicted
    simple: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Budget:
    options: list[Option]
    chosen: int  # into options
    labels: Labels  # `noise`: they say nothing, and the mean of all is taken
    nested: Nested | None = None  # not of two folds, which leave nothing, nor of noise


def simple_average(name: str, K: int | None, k: int) -> Coefficients:
    return parse_one(name)(Run(k), K)[0]


def choose_budget(
    surrogate: Surrogate,
    simple: Mapping[Name, Tensor],
    settings: Linear.Settings,
    problem: Problem,
) -> Budget:
    """`simple`: (name, K) → outputs [O] of an average that does not depend on the data.

    (`uniform`, None) must be among them.
    """
    k, folds = surrogate.k, settings.folds
    sizes, split = grid(k), _Folds(surrogate, folds, problem.seed)
    iterations = min(settings.iterations, FOLD_ITERATIONS)
    learned = torch.zeros(len(sizes), len(split.units), dtype=torch.float64)
    for some in torch.split(torch.arange(folds), split.units.side_by_side(surrogate)):
        left_out = [(fold,) for fold in some.tolist()]
        rests = [split.without(fold) for fold in some.tolist()]
        for position, found in enumerate(split.relaxed(left_out, sizes, iterations, problem)):
            K = sizes[position]
            for (fold,), rest, s in zip(left_out, rests, found, strict=True):
                chosen = relax.improve(rest, mask.largest(s, K), settings.swaps)
                here = split.assigned == fold
                learned[position, here] = split.units.losses(surrogate.mix(mean(chosen, k)))[here]
            done = int(some[0]) * len(sizes) + len(some) * (position + 1)
            problem.events.progress("folds", done, folds * len(sizes))
    every = torch.cat([learned, torch.stack([split.units.losses(out) for out in simple.values()])])
    names: list[Name] = [*((LEARNED, K) for K in sizes), *simple]
    worth = [*sizes, *(1 / sum(c * c for c in simple_average(*key, k)) for key in simple)]
    decided = _decide(names, every, split.units.weights, worth)
    if folds > 2:
        pairs = _without_two(surrogate, split, sizes, settings, problem)
        decided = replace(decided, nested=_nest(names, every, pairs, split, worth))
    if not split.units.by_row:
        return decided
    best_simple = min(simple, key=lambda key: decided.options[names.index(key)].loss)
    probed = {("uniform", None), ("last", None), best_simple}
    labels = surrogate.outputs.labels(
        [out for key, out in simple.items() if key in probed], problem.seed
    )
    if labels == "noise":
        uniform = names.index(("uniform", None))
        return replace(decided, labels=labels, chosen=uniform, nested=None)
    return replace(decided, labels=labels)


def _without_two(
    surrogate: Surrogate,
    split: _Folds,
    sizes: Sequence[int],
    settings: Linear.Settings,
    problem: Problem,
) -> Tensor:
    """[folds, sizes, units]: of masks learned without the fold and without the unit's own."""
    folds, iterations = settings.folds, min(settings.iterations, PAIR_ITERATIONS)
    losses = torch.zeros(folds, len(sizes), len(split.units), dtype=torch.float64)
    pairs, at_once = list(combinations(range(folds), 2)), split.units.side_by_side(surrogate)
    for start in range(0, len(pairs), at_once):
        some = pairs[start : start + at_once]
        for position, found in enumerate(split.relaxed(some, sizes, iterations, problem)):
            chosen = [mask.largest(s, sizes[position]) for s in found]
            C = torch.stack([mean(one, surrogate.k) for one in chosen])
            of_each = split.units.losses_of(surrogate, C)
            for pair, of_units in zip(some, of_each, strict=True):
                for fold, other in (pair, pair[::-1]):
                    here = split.assigned == other
                    losses[fold, position, here] = of_units[here]
    return losses


def _nest(
    names: Sequence[Name], every: Tensor, pairs: Tensor, split: _Folds, worth: Sequence[float]
) -> Nested:
    """every [options, units], masks first; pairs [folds, sizes, units]: of masks by fewer rows."""
    taken, simple = torch.zeros_like(every[:2])
    is_learned = torch.zeros_like(split.assigned, dtype=torch.bool)
    masks, weights = pairs.shape[1], split.units.weights
    for fold, by_fewer in enumerate(pairs):
        here, rest = split.assigned == fold, split.assigned != fold
        known = torch.cat([by_fewer, every[masks:]])[:, rest]
        chosen = _decide(names, known, weights[rest], worth).chosen
        taken[here], is_learned[here] = every[chosen, here], chosen < masks
        means = torch.nan_to_num(known[masks:] @ weights[rest], nan=torch.inf)
        simple[here] = every[masks + int(means.argmin()), here]
    return Nested(taken, is_learned, simple, weights)


def _decide(
    names: Sequence[Name], losses: Tensor, weights: Tensor, worth: Sequence[float]
) -> Budget:
    """losses [options, units], weights [units] (rows in each).

    worth [options]: how many checkpoints each is an average of, 1/Σ c².
    """
    share = weights / weights.sum()
    means = torch.nan_to_num(losses @ share, nan=torch.inf)
    best = int(means.argmin())
    differences = losses - losses[best]
    behind = differences @ share
    variance = ((differences - behind[:, None]) ** 2) @ share
    errors = (variance / max(len(share) - 1, 1)).sqrt()
    options = [
        Option(name, K, float(means[i]), float(behind[i]), float(errors[i]))
        for i, (name, K) in enumerate(names)
    ]
    close = [i for i, o in enumerate(options) if i == best or o.behind <= o.error]
    simple = [i for i in close if options[i].name != LEARNED]
    chosen = max(simple or close, key=lambda i: (worth[i], -options[i].loss))
    return Budget(options, chosen, labels="matter")


class _Folds:
    """Folds of the units."""

    def __init__(self, surrogate: Surrogate, folds: int, seed: int) -> None:
        self._surrogate = surrogate
        self.units = units = Units(surrogate.outputs, surrogate.base)
        if len(units) < folds:
            why = "" if units.by_row else " (the loss does not split into rows)"
            raise TaskError(
                f"K: auto needs {folds} or more selection {units.kind}{why}, found {len(units)}"
            )
        generator = torch.Generator().manual_seed(seed)
        self.assigned = torch.randperm(len(units), generator=generator) % folds  # of each unit

    def relaxed(
        self,
        left_out: Sequence[Sequence[int]],
        sizes: Sequence[int],
        iterations: int,
        problem: Problem,
    ) -> Iterator[Tensor]:
        """For each size, masks [p, k] learned side by side, each without some of the folds."""
        outside = [torch.isin(self.assigned, torch.tensor(some)) for some in left_out]
        room = problem.room - self._surrogate.size.bytes
        gradient = self.units.gradient_on(self._surrogate, ~torch.stack(outside), room)
        k = self._surrogate.k
        relaxed = torch.full((len(left_out), k), sizes[0] / k, dtype=torch.float64)
        for position, K in enumerate(sizes):
            found = relax.relax_together(gradient, K, relaxed, iterations)
            following = sizes[min(position + 1, len(sizes) - 1)]
            relaxed = found * following / K  # a good place to begin for the next K
            yield found

    def without(self, fold: int) -> Surrogate:
        """On all units but the fold's."""
        return self.units.on(self._surrogate, self.assigned != fold)
