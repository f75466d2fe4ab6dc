"""The outputs y_i of every checkpoint, and the user's loss of their mixtures.

The rows of the data are kept with the outputs, so that a mask can be judged on any sample of
them: on a fold, or on rows drawn with repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sewa_cli.objective.objective import Objective, row_losses
from sewa_cli.objective.tree import WALK, Nest, change, take_rows, to_device
from sewa_cli.trajectory import Trajectory

MIXINGS = 39  # of the rows; by luck, one in forty is below all of them
ENOUGH_MIXINGS = 20  # that change anything; from fewer nothing can be told
NAME = "outputs"

# what the labels say: something; nothing; or the loss does not look at the batch at all
Labels = Literal["matter", "noise", "unseen"]


@dataclass
class Part:
    """A selection batch, where its outputs stand in [O], and what they look like."""

    batch: Nest
    n: int
    where: slice
    template: Nest  # its outputs, with shapes alone where the leaves are floating point


@dataclass
class Sample:
    """Rows of each batch, perhaps repeated; None: all of them."""

    rows: list[Tensor | None]
    batches: list[Nest] = field(default_factory=list)  # the batches with those rows


@dataclass(frozen=True)
class Size:
    """What the cache holds: numbers for each checkpoint, their precision, rows of how many."""

    numbers: int
    dtype: str
    bytes: int
    rows: int
    of_rows: int


class Surrogate:
    """The outputs y_i of k checkpoints around a base, and the user's loss of their mixtures."""

    def __init__(
        self,
        objective: Objective,
        parts: list[Part],
        base: Tensor,
        cache: Trajectory,
        size: Size,
        seed: int,
    ) -> None:
        self.base = base  # f(b) [O]: the true outputs of the base
        self.size = size
        self._objective = objective
        self._parts = parts
        self._cache = cache
        self._seed = seed
        self._frozen = ~torch.isfinite(base)  # -Inf of a masked logit, say: no direction changes it
        self._has_frozen = bool(self._frozen.any())
        self.everything = Sample([None] * len(parts), [part.batch for part in parts])

    @property
    def k(self) -> int:
        return self._cache.k

    def mix(self, coefficients: Tensor) -> Tensor:
        """c [k] → Σ c_i y_i [O]."""
        few = coefficients.count_nonzero() <= self.k // 2
        mixed = (
            self._cache.mix_few(coefficients.tolist())
            if few
            else self._cache.mix(coefficients[None])[0]
        )
        return self._thaw(mixed)

    def true_outputs(self) -> Tensor:
        """Of what is in the model now, [O]."""
        found = [run_model(self._objective, part.batch, self._seed) for part in self._parts]
        return torch.cat([flatten(outputs) for outputs in found])

    def difference(self, gain: int, lose: int) -> Tensor:
        """y_gain − y_lose [O]."""
        c = [0.0] * self.k
        c[gain], c[lose] = 1.0, -1.0
        return self._cache.mix_few(c)

    def _thaw(self, mixed: Tensor) -> Tensor:
        return torch.where(self._frozen, self.base, mixed) if self._has_frozen else mixed

    def loss_and_gradient(
        self, coefficients: Tensor, sample: Sample | None = None
    ) -> tuple[float, Tensor]:
        """c [k] → the loss of its predicted outputs, and its gradient in c [k], float64."""
        mixed = self.mix(coefficients)
        gradient = torch.zeros_like(mixed)
        total = 0.0
        for part, share, taken, batch in self._shares(sample or self.everything):
            with torch.enable_grad():  # one batch's graph at a time
                leaf = mixed[part.where].detach().requires_grad_(True)
                # not the leaf itself: a loss may work in place
                loss = share * self._part_loss(part, leaf.clone(), taken, batch)
                self._objective.backward(loss)
            if leaf.grad is not None:
                gradient[part.where] = leaf.grad
            total += float(loss.detach())
        if self._has_frozen:
            gradient = gradient.masked_fill(self._frozen, 0.0)
        return total, self._cache.pull_back(gradient[None])[0].double().cpu()

    def loss(self, outputs: Tensor, sample: Sample | None = None) -> float:
        """Of outputs [O], a mean over the rows of the sample."""
        with torch.no_grad():
            return sum(
                share * float(self._part_loss(part, outputs[part.where].clone(), taken, batch))
                for part, share, taken, batch in self._shares(sample or self.everything)
            )

    def _shares(self, sample: Sample) -> Iterator[tuple[Part, float, Tensor | None, Nest]]:
        """The batches that have rows in the sample, each with its share of them."""
        found = [
            (part, part.n if taken is None else len(taken), taken, batch)
            for part, taken, batch in zip(self._parts, sample.rows, sample.batches, strict=True)
        ]
        total = sum(n for _, n, _, _ in found)
        return ((part, n / total, taken, batch) for part, n, taken, batch in found if n > 0)

    def _part_loss(self, part: Part, outputs: Tensor, taken: Tensor | None, batch: Nest) -> Tensor:
        nest = unflatten(part.template, outputs)
        if taken is not None:
            nest = take_rows(nest, part.n, taken)
        # its containers anew: a loss may pop from them
        loss = self._objective.loss(nest, to_device(batch, outputs.device))
        return loss.reshape(()).double()

    # ---- rows --------------------------------------------------------------------------------

    @property
    def counts(self) -> list[int]:
        return [part.n for part in self._parts]

    def sample(self, rows: Sequence[Tensor | None]) -> Sample:
        """The batches with only these rows."""
        taken = [
            part.batch if index is None else take_rows(part.batch, part.n, index)
            for part, index in zip(self._parts, rows, strict=True)
        ]
        return Sample(list(rows), taken)

    def unit_losses(self, outputs: Tensor) -> Tensor | None:
        """The loss of each row alone [n] float64; None if the loss does not split into rows."""
        found = []
        with torch.no_grad():
            for part in self._parts:
                nest = unflatten(part.template, outputs[part.where].clone())
                batch = to_device(part.batch, outputs.device)
                each = row_losses(self._objective.loss, nest, batch, part.n)
                if each is None:
                    return None
                found.append(each.cpu())
        together = torch.cat(found)
        whole = self.loss(outputs)
        if not torch.allclose(together.mean(), torch.tensor(whole).double(), rtol=1e-4, atol=1e-6):
            return None
        return together

    def batch_losses(self, outputs: Tensor) -> Tensor:
        """The loss of each batch [b] float64."""
        found = []
        for number in range(len(self._parts)):
            only: list[Tensor | None] = [torch.arange(0)] * len(self._parts)
            only[number] = None
            found.append(self.loss(outputs, self.sample(only)))
        return torch.tensor(found, dtype=torch.float64)

    def labels(self, outputs: Sequence[Tensor], seed: int = 0) -> Labels:
        """Do any of these outputs [O] fit their own rows better than rows that were mixed up?

        Labels that were shuffled, or belong to other data, can still be fitted: by being less sure
        of everything. A choice by them is worth nothing.
        """
        generator = torch.Generator().manual_seed(seed)
        mixed = [self._mixed_up(generator) for _ in range(MIXINGS)]
        moved = False
        for own in outputs:
            loss = self.loss(own)
            others = torch.tensor([self.loss(own, sample) for sample in mixed])
            # mixing rows of one class, or a batch of one row, changes nothing
            others = others[(others - loss).abs() > 1e-9 * abs(loss)]
            if 0 < len(others) < ENOUGH_MIXINGS:
                return "matter"
            moved = moved or len(others) > 0
            if len(others) and loss < float(others.min()):
                return "matter"
        alone = all(part.n == 1 for part in self._parts) and len(self._alike()) == len(self._parts)
        return "noise" if moved else "matter" if alone else "unseen"

    def _mixed_up(self, generator: torch.Generator) -> Sample:
        """All outputs, each with another row: of another batch too, where that has its shapes."""
        order = list(range(len(self._parts)))
        for group in self._alike():
            for place, drawn in enumerate(torch.randperm(len(group), generator=generator).tolist()):
                order[group[place]] = group[drawn]
        rows: list[Tensor | None] = [
            torch.randperm(part.n, generator=generator) for part in self._parts
        ]
        batches = self.sample(rows).batches
        return Sample([None] * len(order), [batches[place] for place in order])

    def _alike(self) -> list[list[int]]:
        """Places of batches with the same shapes throughout."""
        groups: dict[str, list[int]] = {}
        for place, part in enumerate(self._parts):
            groups.setdefault(str(shapes_of((part.template, part.batch), all_of=True)), []).append(
                place
            )
        return list(groups.values())

    def splits(self) -> bool:
        """Whether some rows of a batch are a batch: the losses of its halves make up its loss."""
        each = self.unit_losses(self.base)
        if each is None:
            return False
        by_batch = torch.split(each, self.counts)
        if len(each) > len(by_batch) and all(bool((x == x[0]).all()) for x in by_batch):
            return False  # a loss that was computed before it was split is the same for each row
        whole = self.batch_losses(self.base)
        for number, part in enumerate(self._parts):
            if part.n < 2:
                continue
            half = torch.arange(part.n) < part.n // 2
            losses = []
            for chosen in (half, ~half):
                index: list[Tensor | None] = [torch.arange(0)] * len(self._parts)
                index[number] = chosen.nonzero().reshape(-1)
                try:
                    losses.append((int(chosen.sum()), self.loss(self.base, self.sample(index))))
                except Exception:  # whatever the user's loss makes of half a batch
                    return False
            together = sum(n * loss for n, loss in losses) / part.n
            if not abs(together - float(whole[number])) <= 1e-6 + 1e-4 * abs(whole[number]):
                return False
        return True


# ---- a model's outputs on a batch, as one vector and back --------------------------------------


def shapes_of(nest: Nest, all_of: bool = False) -> Nest:
    """Its floating-point tensors (or all) without their values."""

    def shape(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return WALK
        return item.to("meta") if all_of or item.is_floating_point() else item

    return change(nest, shape)


def run_model(objective: Objective, batch: Nest, seed: int) -> Nest:
    """Without gradients; the same random numbers each time, or differences would be noise."""
    devices = [objective.model.device] if objective.model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        outputs = objective.outputs(batch)
    return change(outputs, lambda x: x.detach().clone() if isinstance(x, Tensor) else WALK)


def flatten(nest: Nest) -> Tensor:
    """All floating-point leaves, one after the other, float32 [o]."""
    found: list[Tensor] = []

    def collect(item: Any) -> Any:
        if isinstance(item, Tensor):
            if item.is_floating_point():
                found.append(item.detach().reshape(-1).float())
            return item
        return WALK

    change(nest, collect)
    return torch.cat(found) if found else torch.empty(0)


def unflatten(template: Nest, flat: Tensor) -> Nest:
    """The template with its floating-point leaves from flat [o]; differentiable in flat."""
    at = 0

    def fill(item: Any) -> Any:
        nonlocal at
        if not isinstance(item, Tensor):
            return WALK
        if not item.is_floating_point():
            return item
        piece = flat[at : at + item.numel()].view(item.shape)
        at += item.numel()
        return piece.to(item.dtype)

    return change(template, fill)
