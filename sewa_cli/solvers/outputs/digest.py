"""Logits of many classes, in a few numbers for each target of a cross-entropy.

At a base, a target keeps the logits of its label, of the m largest others, and of s samples j of
the rest, drawn from the rest's own softmax. With Z(c) = Σ exp z_i(c) over the rest, at weights c,

    Z(c) = Z(0) · E_j exp(z_j(c) − z_j(0)),   so   d_j(c) = log Z(0) − log s + z_j(c) − z_j(0)

stands for Z(0)/s of it, and all 1 + m + s numbers are linear in the logits. Their cross-entropy,
logsumexp(d) − d[label], is exact at the base. The samples carry the curvature of the rest, which a
log-sum-exp that is itself taken as linear would not: measured, it is off by 0.045 of a loss of 6
with m = 128, and 32 samples next to the 32 largest by 0.001.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from sewa_cli.objective.classes import Targets
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import Nest, rows
from sewa_cli.rng import seeded
from sewa_cli.solvers.outputs.predictions import KeptOutputs, Piece

WORTHWHILE = 4  # times a digest's numbers: with fewer classes it would save little
LOGITS = 2**25  # bytes of logits at once: larger pieces are not faster
TOGETHER = 2**16  # numbers of a piece


@dataclass(frozen=True)
class Entropies(Piece):
    """Cross-entropies of the targets of some examples, [t, block] numbers."""

    weights: Tensor  # [t], so that an example's loss is the sum over its targets
    examples: Tensor  # [t], which of the piece's examples each target belongs to
    block: int

    def losses(self, mixed: Tensor) -> Tensor:
        d = mixed.view(len(mixed), -1, self.block)
        each = (d.logsumexp(2) - d[:, :, 0]) * self.weights
        n = self.parts.stop - self.parts.start
        found = torch.zeros(len(mixed), n, dtype=torch.float64)
        return found.index_add_(1, self.examples.cpu(), each.cpu().double())

    def totals(self, mixed: Tensor) -> Tensor:
        return self.losses(mixed).sum(1)

    def gradients(self, mixed: Tensor, shares: Tensor) -> Tensor:
        weights = shares.to(mixed)[:, self.examples] * self.weights
        found = mixed.view(len(mixed), -1, self.block).softmax(2)
        found[:, :, 0] -= 1
        found = found.mul_(weights[:, :, None])
        # what does not count may be infinite
        return torch.where(weights[:, :, None] == 0, 0.0, found).view(mixed.shape)


@dataclass(frozen=True)
class Digest(KeptOutputs):
    """The classes that each target keeps, [T, 1 + m] with the label first, and its samples [T, s].

    shift  [T, s]: log Z(0) − log s − z_j(0)
    """

    logits: Logits
    kept: Tensor
    drawn: Tensor
    shift: Tensor

    def run(self) -> Tensor:
        width = self.kept.shape[1] + self.drawn.shape[1]
        found = torch.empty(len(self.kept), width, device=self.kept.device)
        for some, logits in self.logits.pieces():
            samples = logits.gather(1, self.drawn[some].long()) + self.shift[some]
            found[some] = torch.cat([logits.gather(1, self.kept[some].long()), samples], 1)
        return self.logits.fill(found).reshape(-1)


@dataclass(frozen=True)
class Logits:
    """Runs the model for the logits at all targets of some batches."""

    objective: Objective
    batches: Sequence[Nest]
    targets: Sequence[Targets]
    seed: int
    bytes: int  # of logits at once

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield targets with their logits, float32 [p, V], to be written into."""
        start, pairs = 0, list(zip(self.batches, self.targets, strict=True))
        batches = self.objective.events.over(
            "outputs of examples", pairs, sum(map(rows, self.batches)), lambda x: rows(x[0])
        )
        for batch, targets in batches:
            with torch.no_grad(), seeded(self.seed):  # or differences would be noise
                for piece, logits in self.objective.logits(batch, targets, self.bytes):
                    yield slice(start + piece.start, start + piece.stop), logits
            start += len(targets.where)

    def fill(self, found: Tensor) -> Tensor:
        """Share [T, …] among the ranks, each of which has its own targets."""
        pairs = zip(self.batches, self.targets, strict=True)
        owners = torch.cat([self.objective.owners(*one) for one in pairs])
        shares = self.objective.shares
        return found if shares is None else shares.fill(found, owners)


def keep_digest(logits: Logits, largest: int, samples: int, flat: Tensor) -> tuple[Digest, Tensor]:
    """Choose the classes to keep at the weights `flat`, which are in the model.

    Also return the numbers of these weights, [O].
    """
    objective, device = logits.objective, logits.objective.model.device
    label = torch.cat([one.classes for one in logits.targets]).to(device)
    kept = torch.empty(len(label), 1 + largest, dtype=torch.int32, device=device)
    drawn = torch.empty(len(label), samples, dtype=torch.int32, device=device)
    shift = torch.empty(len(label), samples, device=device)
    found = torch.empty(len(label), 1 + largest + samples, device=device)
    random = torch.rand(len(label), samples, generator=torch.Generator().manual_seed(logits.seed))
    for some, z in logits.pieces():
        kept[some], drawn[some], shift[some], found[some] = _choose(
            z, label[some, None], largest, random[some].to(device)
        )
    for shared in (kept, drawn, shift, found):
        logits.fill(shared)
    memo = objective.memo
    identity = "" if memo is None else memo.digest(logits.batches, largest, samples, flat)
    pieces = _pieces(logits, found.shape[1])
    return Digest(pieces, identity, logits, kept, drawn, shift), found.reshape(-1)


def _choose(
    logits: Tensor, label: Tensor, largest: int, random: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose classes of logits [p, V], which are written over: kept, drawn, shift and numbers.

    label [p, 1]; random [p, s]: uniform in [0, 1).
    """
    s, own = random.shape[1], logits.gather(1, label)
    logits.scatter_(1, label, -inf)
    top = logits.topk(largest, 1).indices
    found = torch.cat([own, logits.gather(1, top)], 1)
    rest = logits.scatter(1, top, -inf)
    highest = rest.amax(1, keepdim=True).nan_to_num(neginf=0.0)
    mass = rest.sub_(highest).exp_()
    log_sum = mass.sum(1, keepdim=True).log() + highest - log(s)
    # one from each s-th of the rest: each is as likely as by its softmax, and they vary less
    strata = (torch.arange(s, device=logits.device) + random) / s
    cumulated = mass.cumsum(1)
    drawn = torch.searchsorted(cumulated, strata * cumulated[:, -1:] * (1 - 1e-6), right=True)
    drawn = drawn.clamp_max(logits.shape[1] - 1)
    # where nothing is left, as of logits that are -Inf, nothing is sampled either
    shift = (log_sum - logits.gather(1, drawn)).nan_to_num(nan=-inf, posinf=-inf)
    sampled = torch.where(shift == -inf, -inf, log_sum.expand(-1, s))
    return torch.cat([label, top], 1).int(), drawn.int(), shift, torch.cat([found, sampled], 1)


def _pieces(logits: Logits, block: int) -> list[Entropies]:
    """Examples in pieces of a bounded size, at least one in each."""
    counts, device = list(map(rows, logits.batches)), logits.objective.model.device
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    owners = [one.rows.cpu() + start for one, start in zip(logits.targets, starts, strict=False)]
    of = torch.cat(owners)
    # the mean over examples is that over batches, each with as much weight as it has examples
    weights = torch.cat([one.weights * n for one, n in zip(logits.targets, counts, strict=True)])
    ends = torch.bincount(of, minlength=sum(counts)).cumsum(0)
    found, example, target = [], 0, 0
    while example < len(ends):
        most = target + max(1, TOGETHER // block)
        stop = max(example + 1, int(torch.searchsorted(ends, most, right=True)))
        end = int(ends[stop - 1])
        some = slice(target, end)
        found.append(
            Entropies(
                slice(target * block, end * block),
                slice(example, stop),
                weights[some].to(device),
                (of[some] - example).to(device),
                block,
            )
        )
        example, target = stop, end
    return found
