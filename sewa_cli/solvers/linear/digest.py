"""Outputs that are logits of many classes, in a few numbers for each target of a cross-entropy.

At a base, a target keeps the logits of its label, of the m largest others, and of s samples j of
the rest, drawn from the rest's own softmax. With Z(c) = Σ exp z_i(c) over the rest, at weights c,

    Z(c) = Z(0) · E_j exp(z_j(c) − z_j(0)),   so   d_j(c) = log Z(0) − log s + z_j(c) − z_j(0)

stands for Z(0)/s of it, and all 1 + m + s numbers are linear in the logits. Their cross-entropy,
logsumexp(d) − d[label], is exact at the base; the samples carry the curvature of the rest, which a
log-sum-exp that is itself taken as linear would not: measured, it is off by 0.045 of a loss of 6
with m = 128, and 32 samples beside the 32 largest by 0.001.

Of any other weights the true loss is wanted, not that of a sample: there, the d_j are shifted
together so that they make up the true Z. Before there is a base, the rest is one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from math import inf, log
from typing import Self

import torch
from torch import Tensor

from sewa_cli.objective.classes import Targets
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import Nest, rows
from sewa_cli.rng import seed_torch
from sewa_cli.solvers.linear.outputs import MIXINGS, Labels, Outputs

# times a digest's numbers: with fewer classes it would save little. Chosen, not measured
WORTHWHILE = 4
PIECE = 2**25  # bytes of logits at once: larger pieces are not faster
GROUP = 32  # neighbouring classes, of which the largest is looked at first


class Digest(Outputs):
    """A few numbers for each target, [T, each] as one vector, and their cross-entropy."""

    adds_up = True

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Nest],
        targets: Sequence[Targets],
        largest: int,
        samples: int,
        seed: int,
        of_rows: int,
        room: int,
    ) -> None:
        """`largest`: m; `samples`: s, both from the first `around` on; `room`: bytes to work in."""
        super().__init__(objective, seed, of_rows)
        self._batches = list(zip(batches, targets, strict=True))
        self._counts = [rows(batch) for batch in batches]
        self._largest, self._samples = largest, samples
        self._piece = max(min(PIECE, room // 16), 1)
        device = objective.model.device
        starts = [0, *torch.tensor(self._counts).cumsum(0).tolist()]
        self._rows = torch.cat(
            [one.rows.cpu() + start for one, start in zip(targets, starts, strict=False)]
        ).to(device)
        self._label = torch.cat([one.classes for one in targets]).to(device)
        # so that the mean over rows is that over batches, each with as much weight as it has rows
        self._weights = torch.cat(
            [one.weights * n for one, n in zip(targets, self._counts, strict=True)]
        ).to(device)
        owners = [objective.owners(*one) for one in self._batches]
        self._owners = torch.cat(owners)  # of several ranks, which runs each target [T]
        self._times: Tensor | None = None  # how often each row counts, [n]; None: once
        self._pairs, self._other = self._pair_up(seed)
        self._kept: Tensor | None = None  # [T, 1 + m] classes, the label first; with a base only
        self._drawn: Tensor | None = None  # [T, s] classes
        self._shift: Tensor | None = None  # [T, s]: log Z(0) − log s − z_j(0)

    @classmethod
    def like(
        cls, objective: Objective, count: int, targets: Targets, largest: int, samples: int
    ) -> Self:
        """So many rows around a base that no model was run at: only good for being timed."""
        found = cls(objective, [torch.empty(count, 0)], [targets], largest, samples, 0, count, 0)
        found._kept = torch.empty(0)
        return found

    @property
    def block(self) -> int:
        return 3 if self._kept is None else 1 + self._largest + self._samples

    @property
    def numbers(self) -> int:
        return len(self._label) * self.block

    @property
    def counts(self) -> list[int]:
        return self._counts

    @property
    def batches(self) -> list[Nest]:
        return [batch for batch, _ in self._batches]

    # ---- of a model ----------------------------------------------------------------------------

    def run(self) -> Tensor:
        found = torch.empty(len(self._label), self.block, device=self._objective.model.device)
        for some, logits in self._logits():
            found[some] = self._true(some, logits)
        return self._of_all(found).reshape(-1)

    def _of_all(self, found: Tensor) -> Tensor:
        """[T, …], of which each rank has its own."""
        return self._objective.shares.fill(found, self._owners)

    def linear_outputs(self) -> Tensor:
        found = torch.empty(len(self._label), self.block, device=self._objective.model.device)
        for some, logits in self._logits():
            found[some] = self._linear(some, logits)
        return self._of_all(found).reshape(-1)

    def around(self, flat: Tensor) -> tuple[Outputs, Tensor]:
        self._objective.model.set(flat)
        new, device = copy(self), self._objective.model.device
        # what its numbers are is a matter of the base
        new.identity = self._objective.memo.digest(self.identity, flat)
        T, m, s = len(self._label), self._largest, self._samples
        new._kept = torch.empty(T, 1 + m, dtype=torch.int32, device=device)
        new._drawn = torch.empty(T, s, dtype=torch.int32, device=device)
        new._shift = torch.empty(T, s, device=device)
        found = torch.empty(T, new.block, device=device)
        drawn = torch.rand(T, s, generator=torch.Generator().manual_seed(self._seed))
        for some, logits in self._logits():
            found[some] = new._choose(some, logits, drawn[some])
        for kept in (new._kept, new._drawn, new._shift, found):
            self._of_all(kept)
        return new, found.reshape(-1)

    def _logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Of the weights in the model: (targets, float32 [p, V], to be written into)."""
        model, start = self._objective.model, 0
        model.module.eval()
        devices = [model.device] if model.device.type == "cuda" else []
        told = self._objective.events.over(
            "outputs of rows", self._batches, sum(self._counts), lambda one: rows(one[0])
        )
        for batch, targets in told:
            # the same random numbers each time, or differences would be noise
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                seed_torch(self._seed)
                for piece, logits in self._objective.logits(batch, targets, self._piece):
                    yield slice(start + piece.start, start + piece.stop), logits
            start += len(targets.where)

    def _linear(self, some: slice, logits: Tensor) -> Tensor:
        """[p, V] → [p, 1 + m + s]."""
        assert self._kept is not None
        assert self._drawn is not None
        assert self._shift is not None
        samples = logits.gather(1, self._drawn[some].long()) + self._shift[some]
        return torch.cat([logits.gather(1, self._kept[some].long()), samples], 1)

    def _true(self, some: slice, logits: Tensor) -> Tensor:
        if self._kept is None:
            both = torch.stack([self._label[some], self._other[some]], 1)
            found = logits.gather(1, both)
            found[:, 1].masked_fill_(both[:, 0] == both[:, 1], -inf)  # not counted twice
            rest, _ = _sum_out(logits, both)
            return torch.cat([found, rest[:, None]], 1)
        found = self._linear(some, logits)
        rest, _ = _sum_out(logits, self._kept[some].long())
        samples = found[:, 1 + self._largest :]
        samples += (rest - samples.logsumexp(1)).nan_to_num(nan=0.0, neginf=-inf)[:, None]
        return found

    def _choose(self, some: slice, logits: Tensor, random: Tensor) -> Tensor:
        """Which classes to keep and which to sample; what they are here, [p, 1 + m + s].

        random [p, s]: uniform in [0, 1).
        """
        assert self._kept is not None
        assert self._drawn is not None
        assert self._shift is not None
        label, other, s = self._label[some, None], self._other[some, None], self._samples
        own = logits.gather(1, label)
        of_other = logits.gather(1, other)
        logits.scatter_(1, label, -inf)
        # the other row's label is among those that are kept, in the first place
        logits.scatter_(1, other, torch.where(other == label, -inf, inf))
        largest = _largest(logits, self._largest)
        found = torch.cat([own, logits.gather(1, largest)], 1)
        found[:, 1:2] = torch.where(other == label, found[:, 1:2], of_other)
        drawable = logits.scatter(1, largest, -inf)
        rest, mass = _sum_out(drawable)
        # one from each s-th of the rest: each is as likely as by its softmax, and they vary less
        strata = torch.arange(s) + random
        cumulated = mass.cumsum(1)
        at = (strata / s).to(logits.device) * cumulated[:, -1:] * (1 - 1e-6)
        drawn = torch.searchsorted(cumulated, at, right=True).clamp_max(logits.shape[1] - 1)
        # where nothing is left, as of logits that are -Inf, nothing is sampled either
        shift = (rest[:, None] - log(s) - logits.gather(1, drawn)).nan_to_num(nan=-inf, posinf=-inf)
        self._kept[some] = torch.cat([label, largest], 1).int()
        self._drawn[some] = drawn.int()
        self._shift[some] = shift
        samples = (rest[:, None] - log(s)).expand(-1, s)
        return torch.cat([found, torch.where(shift == -inf, -inf, samples)], 1)

    # ---- losses --------------------------------------------------------------------------------

    def loss(self, outputs: Tensor) -> float:
        return float(self._mean_of(self._entropies(outputs)))

    def loss_and_gradient(self, outputs: Tensor) -> tuple[float, Tensor]:
        found = outputs.view(1, len(self._label), self.block)
        total = float(self._mean_of(self._entropies(outputs)))
        return total, _slopes(found, self._share[None]).reshape(-1)

    def _entropies(self, outputs: Tensor) -> Tensor:
        """[O] → cross-entropies [T]."""
        d = outputs.view(len(self._label), self.block)
        return d.logsumexp(1) - d[:, 0]

    def _mean_of(self, entropies: Tensor) -> Tensor:
        """A row that does not count may be infinite."""
        share = self._share.double()
        return torch.where(share == 0, 0.0, entropies.double() * share).sum()

    @property
    def _share(self) -> Tensor:
        """What each target counts, [T]."""
        if self._times is None:
            return self._weights / sum(self._counts)
        times = self._times.to(self._rows.device)
        return self._weights * times[self._rows] / times.sum()

    def unit_losses(self, outputs: Tensor) -> Tensor | None:
        """None only where the loss is not finite: it always splits."""
        found = self._by_row((self._entropies(outputs) * self._weights)[None])[0]
        return found if bool(torch.isfinite(found).all()) else None

    def _by_row(self, values: Tensor, some: slice = slice(None)) -> Tensor:
        """Of targets [p, t] → sums over those of each row [p, n], float64."""
        found = torch.zeros(len(values), sum(self._counts), dtype=torch.float64)
        return found.index_add_(1, self._rows[some].cpu(), values.cpu().double())

    def batch_losses(self, outputs: Tensor) -> Tensor:
        each = self._by_row((self._entropies(outputs) * self._weights)[None])[0]
        return torch.stack([some.mean() for some in torch.split(each, self._counts)])

    def splits(self, outputs: Tensor) -> bool:  # noqa: ARG002
        return True

    def on(self, times: Tensor) -> Self:
        other = copy(self)
        other._times = times.float()
        return other

    def on_batches(self, chosen: Tensor) -> Self:
        return self.on(chosen.repeat_interleave(torch.tensor(self._counts)))

    # ---- of many mixtures at once ----------------------------------------------------------------

    def factors(self, shares: Tensor, by_row: bool) -> Tensor:  # noqa: ARG002 - always
        """shares [p, n] → [p, T]."""
        return shares.float().to(self._rows.device)[:, self._rows] * self._weights

    def gradients(self, mixed: Tensor, columns: slice, factors: Tensor) -> Tensor:
        some = slice(columns.start // self.block, columns.stop // self.block)
        found = mixed.view(len(mixed), -1, self.block)
        return _slopes(found, factors[:, some]).view(mixed.shape)

    def row_losses(self, mixed: Tensor, columns: slice) -> Tensor:
        some = slice(columns.start // self.block, columns.stop // self.block)
        d = mixed.view(len(mixed), -1, self.block)
        return self._by_row((d.logsumexp(2) - d[:, :, 0]) * self._weights[some], some)

    # ---- labels --------------------------------------------------------------------------------

    def _pair_up(self, seed: int) -> tuple[Tensor, Tensor]:
        """Pair groups of rows at random: the pair of each row [n], and the class that each target
        would have, were the labels of its pair exchanged [T]: the other row's, as many places in.
        """
        n = sum(self._counts)
        groups = torch.arange(n) if self.groups is None else self.groups
        rows_of = torch.bincount(groups)
        count, half = len(rows_of), len(rows_of) // 2
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        pairs, other = torch.empty(count, dtype=torch.long), torch.arange(count)
        pairs[order] = torch.arange(count) // 2
        other[order[0 : 2 * half : 2]] = order[1 : 2 * half : 2]
        other[order[1 : 2 * half : 2]] = order[0 : 2 * half : 2]
        pairs = pairs[groups]
        # of the other group the row at the same place; of a shorter one, beginning again
        by_group = groups.argsort(stable=True)
        begin = rows_of.cumsum(0) - rows_of
        within = torch.empty(n, dtype=torch.long)
        within[by_group] = torch.arange(n) - begin[groups[by_group]]
        theirs = other[groups]
        partner = by_group[begin[theirs] + within % rows_of[theirs]]
        of_row, label = self._rows.cpu(), self._label.cpu()
        sizes = torch.bincount(of_row, minlength=n)
        first = sizes.cumsum(0) - sizes
        place = torch.arange(len(of_row)) - first[of_row]
        there = place < sizes[partner[of_row]]
        at = torch.where(there, first[partner[of_row]] + place, torch.arange(len(of_row)))
        return pairs, label[at].to(self._label.device)

    def _mixed_up_losses(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Labels of half the pairs are exchanged, another half each time."""
        d = outputs.view(len(self._label), self.block)
        differs = self._label != self._other
        lost = torch.where(differs, d[:, 0] - d[:, 1], 0.0) * self._weights
        by_row = self._by_row(lost[None])[0]
        by_pair = torch.zeros(int(self._pairs.max()) + 1, dtype=torch.float64)
        by_pair.index_add_(0, self._pairs, by_row)
        exchanged = torch.rand(MIXINGS, len(by_pair), generator=generator) < 0.5
        return self.loss(outputs) + exchanged.double() @ by_pair / len(by_row)

    def _mean_over_rows(self, outputs: Tensor) -> None:
        """Each target has other classes."""

    def _unmoved(self, outputs: Tensor) -> Labels:  # noqa: ARG002
        return "matter"  # a cross-entropy sees its labels


def _slopes(d: Tensor, weights: Tensor) -> Tensor:
    """d [p, t, each], weights [p, t] → gradients of Σ weights · cross-entropy in d."""
    found = d.softmax(2)
    found[:, :, 0] -= 1
    found = found.mul_(weights[:, :, None])
    if not torch.isfinite(found.sum()):  # what does not count may be infinite
        found = torch.where(weights[:, :, None] == 0, 0.0, found)
    return found


def _sum_out(logits: Tensor, without: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log Σ exp over the classes but those in `without` [p, w]; and exp(logits − their largest).

    The logits are written over.
    """
    if without is not None:
        logits = logits.scatter_(1, without, -inf)
    top = logits.amax(1, keepdim=True)
    mass = logits.sub_(top.nan_to_num(neginf=0.0)).exp_()
    return mass.sum(1).log() + top[:, 0], mass


def _largest(x: Tensor, m: int) -> Tensor:
    """Places of the m largest of each row of x [p, V], largest first: [p, m].

    They are in the m groups with the largest maxima, which is far less to sort.
    """
    p, V = x.shape
    groups = V // GROUP
    if groups <= 2 * m:
        return x.topk(m, 1).indices
    maxima = x[:, : groups * GROUP].reshape(p, groups, GROUP).amax(2)
    best = maxima.topk(m, 1).indices
    inside = (best[:, :, None] * GROUP + torch.arange(GROUP, device=x.device)).view(p, -1)
    left = torch.arange(groups * GROUP, V, device=x.device).expand(p, -1)
    candidates = torch.cat([inside, left], 1)
    return candidates.gather(1, x.gather(1, candidates).topk(m, 1).indices)
