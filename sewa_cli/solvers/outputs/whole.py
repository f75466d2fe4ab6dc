"""All outputs of a model, and the user's own loss of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import (
    WALK,
    Nest,
    change,
    has_rows,
    join_rows,
    rows,
    tensors,
    to_device,
)
from sewa_cli.objective.units import row_losses
from sewa_cli.rng import seeded
from sewa_cli.solvers.outputs.predictions import KeptOutputs, Piece

# in batches that are joined: examples (a loss may compare each with each), and numbers of outputs
EXAMPLES_TOGETHER, TOGETHER = 256, 2**15


@dataclass(frozen=True)
class Batch(Piece):
    """A batch, or several joined; `template` has its outputs without values."""

    objective: Objective
    batch: Nest
    template: Nest
    n: int
    splits: bool  # into examples; else the batch is one part

    @torch.no_grad()
    def losses(self, mixed: Tensor) -> Tensor:
        if not self.splits:
            return self.totals(mixed)[:, None] / self.n
        found = []
        for outputs, batch in self._each(mixed):
            each = row_losses(self.objective.loss, outputs, batch, self.n)
            if each is None:
                raise TaskError(
                    "loss() splits into examples for some averages only; return equal shapes"
                )
            found.append(each)
        return torch.stack(found)

    @torch.no_grad()
    def totals(self, mixed: Tensor) -> Tensor:
        found = [self.objective.loss(*one).reshape(()) for one in self._each(mixed)]
        return self.n * torch.stack(found).cpu().double()

    def gradients(self, mixed: Tensor, shares: Tensor) -> Tensor:
        """Scale the gradient of the mean, example by example: the loss splits into them.

        An output that belongs to no example is scaled by the share of the whole piece.
        """
        with torch.enable_grad():
            leaf = mixed.detach().requires_grad_(True)
            # not the leaf itself: a loss may work in place
            losses = [self.objective.loss(*one).reshape(()) for one in self._each(leaf.clone())]
            self.objective.backward(torch.stack(losses).sum())
        gradients = torch.zeros_like(mixed) if leaf.grad is None else leaf.grad
        shares = shares.to(mixed)
        whole = shares.sum(1, keepdim=True)
        for where, one in _places(self.template):
            factor = whole
            if self.splits and has_rows(one, self.n):
                factor = (self.n * shares).repeat_interleave(one.numel() // self.n, 1)
            gradients[:, where] *= factor
        return gradients

    def mixed_up(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return outputs [1, columns] with each example's given to another."""
        order = torch.randperm(self.n, generator=generator).to(outputs.device)
        found = outputs.clone()
        for where, one in _places(self.template):
            if has_rows(one, self.n):
                found[0, where] = outputs[0, where].view(self.n, -1)[order].reshape(-1)
        return found

    def _each(self, mixed: Tensor) -> Iterator[tuple[Nest, Nest]]:
        """Yield each of the outputs in their own form, with the batch: a loss may change both."""
        for one in mixed:
            yield unflatten(self.template, one.clone()), to_device(self.batch, one.device)


@dataclass(frozen=True)
class WholeOutputs(KeptOutputs):
    """The outputs of all batches, as the user made them."""

    pieces: Sequence[Batch]
    objective: Objective
    batches: Sequence[Nest]
    seed: int

    def run(self) -> Tensor:
        events, counts = self.objective.events, list(map(rows, self.batches))
        batches = events.over("outputs of examples", self.batches, sum(counts), rows)
        outputs = [flatten(run_model(self.objective, batch, self.seed)) for batch in batches]
        found = torch.cat(outputs).to(self.objective.model.device)
        if len(found) != self.numbers:
            raise TaskError(
                "predict() gives outputs whose size depends on the weights; use --solver gumbel"
            )
        return found


def keep_whole(
    objective: Objective, batches: Sequence[Nest], splits: bool, seed: int
) -> tuple[WholeOutputs, Tensor]:
    """Keep all outputs; also return those of the weights in the model, [O]."""
    found: list[Batch] = []
    outputs: list[Tensor] = []
    column = part = 0
    for batch in batches:
        out, n = run_model(objective, batch, seed), rows(batch)
        outputs.append(flatten(out))
        columns = slice(column, column := column + len(outputs[-1]))
        parts = slice(part, part := part + (n if splits else 1))
        found.append(
            Batch(columns, parts, objective, batch, change(out, _without_values), n, splits)
        )
    at = torch.cat(outputs).to(objective.model.device)
    if splits:
        found = _joined(found, at)
    identity = "" if objective.memo is None else objective.memo.digest(batches)
    return WholeOutputs(found, identity, objective, batches, seed), at


def _joined(batches: list[Batch], at: Tensor) -> list[Batch]:
    """Join small neighbours where each example's loss at outputs [O] stays what it is.

    A call of the user's loss on few examples is mostly overhead, and there are many calls.
    """
    groups: list[list[Batch]] = []
    for one in batches:
        first = groups[-1][0] if groups else one
        examples = one.parts.stop - first.parts.start
        numbers = one.columns.stop - first.columns.start
        if groups and examples <= EXAMPLES_TOGETHER and numbers <= TOGETHER:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [batch for group in groups for batch in _join(group, at)]


def _join(group: list[Batch], at: Tensor) -> list[Batch]:
    # one leaf alone stands in [O] as it would if the batches were one
    if len(group) == 1 or any(len(tensors(one.template)) != 1 for one in group):
        return group
    first, counts = group[0], [one.n for one in group]
    template = join_rows([one.template for one in group], counts)
    batch = join_rows([one.batch for one in group], counts)
    if template is None or batch is None:
        return group
    columns = slice(first.columns.start, group[-1].columns.stop)
    parts = slice(first.parts.start, group[-1].parts.stop)
    joined = Batch(columns, parts, first.objective, batch, template, sum(counts), True)
    apart = torch.cat([one.losses(at[None, one.columns]) for one in group], 1)
    with suppress(Exception):  # whatever the user's loss makes of more examples than it ever saw
        mixed = at[None, columns]
        together, total = joined.losses(mixed), joined.totals(mixed)
        if torch.allclose(together, apart, rtol=1e-4, atol=1e-6) and torch.allclose(
            total, apart.sum(1), rtol=1e-4, atol=1e-6
        ):
            return [joined]
    return group


# ---- a model's outputs on a batch, as one vector and back --------------------------------------


def run_model(objective: Objective, batch: Nest, seed: int) -> Nest:
    """Run without gradients; the same random numbers each time, or differences would be noise."""
    with torch.no_grad(), seeded(seed):
        outputs = objective.outputs(batch)
    return change(outputs, lambda x: x.detach().clone() if isinstance(x, Tensor) else WALK)


def _without_values(item: Any) -> Any:
    """Return a floating-point tensor with its shape and no values."""
    if not isinstance(item, Tensor):
        return WALK
    return item.to("meta") if item.is_floating_point() else item


def flatten(nest: Nest) -> Tensor:
    """Return all floating-point leaves, one after the other, float32 [o]."""
    floats = [x.detach().reshape(-1).float() for x in tensors(nest) if x.is_floating_point()]
    return torch.cat(floats) if floats else torch.empty(0)


def unflatten(template: Nest, flat: Tensor) -> Nest:
    """Fill the template's floating-point leaves from flat [o]; differentiable in flat."""
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


def _places(template: Nest) -> Iterator[tuple[slice, Tensor]]:
    """Yield the floating-point leaves, and where each stands among the columns of its piece."""
    at = 0
    for leaf in tensors(template):
        if leaf.is_floating_point():
            yield slice(at, at := at + leaf.numel()), leaf
