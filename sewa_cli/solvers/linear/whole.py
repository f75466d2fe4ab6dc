"""All outputs of a model as one vector, and the user's own loss of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self

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
    take_rows,
    tensors,
    to_device,
)
from sewa_cli.objective.units import row_losses
from sewa_cli.rng import seed_torch
from sewa_cli.solvers.linear.outputs import MIXINGS, Labels, Outputs

# in batches that are joined: rows (a loss may compare each with each), and numbers of outputs
ROWS_TOGETHER, TOGETHER = 256, 2**15


@dataclass(frozen=True)
class Part:
    """A selection batch, or rows of it; where the whole batch's outputs stand in [O]."""

    batch: Nest
    n: int  # rows of the whole batch
    where: slice
    template: Nest  # its outputs, with shapes alone where the leaves are floating point
    taken: Tensor | None = None  # which rows, perhaps repeated; None: all of them

    @property
    def count(self) -> int:
        return self.n if self.taken is None else len(self.taken)

    def take(self, index: Tensor) -> Part:
        return replace(self, batch=take_rows(self.batch, self.n, index), taken=index)

    def rows_like(self, other: Part) -> bool:
        """Whether its tensors have the same shapes, but for the number of rows."""
        pairs = [tensors((part.template, part.batch)) for part in (self, other)]
        return [x.shape[1:] for x in pairs[0]] == [x.shape[1:] for x in pairs[1]]

    def leaves(self) -> Iterator[tuple[slice, Tensor]]:
        """Of its outputs those that are in [O], and where."""
        at = self.where.start
        for leaf in (x for x in tensors(self.template) if x.is_floating_point()):
            yield slice(at, at := at + leaf.numel()), leaf

    def outputs(self, flat: Tensor) -> Nest:
        """Of its rows, from those of all batches, flat [O]."""
        nest = unflatten(self.template, flat)
        return nest if self.taken is None else take_rows(nest, self.n, self.taken)


class Whole(Outputs):
    """All outputs of all batches, and the user's loss of them."""

    def __init__(
        self, objective: Objective, parts: list[Part], seed: int, of_rows: int | None = None
    ) -> None:
        super().__init__(
            objective, seed, sum(part.n for part in parts) if of_rows is None else of_rows
        )
        self._run = parts  # what the model is run on, as the user made them
        self._parts = parts  # what the loss is called on: these, or several joined

    def join(self, outputs: Tensor, room: int) -> None:
        """Let the loss be called on small neighbouring batches together, where it splits into rows.

        A call on few rows is mostly overhead, and there are many. `outputs` [O] are to see whether
        the loss of each row stays what it is; `room`: bytes that copies of the batches may take.
        """
        if len(self._run) == 1 or not self.splits(outputs):
            return
        apart, groups = self.unit_losses(outputs), list[list[Part]]()
        for part in self._run:
            room -= sum(x.nbytes for x in tensors(part.batch))
            first = groups[-1][0] if groups else part
            rows = part.n + sum(one.n for one in groups[-1]) if groups else part.n
            fits = part.where.stop - first.where.start <= TOGETHER and rows <= ROWS_TOGETHER
            if groups and room >= 0 and fits and part.rows_like(first):
                groups[-1].append(part)
            else:
                groups.append([part])
        joined = self._with([part for group in groups for part in _joined(group)])
        if len(joined._parts) == len(self._run):
            return
        with suppress(Exception):  # whatever the user's loss makes of more rows than it ever saw
            together = joined.unit_losses(outputs)
            if apart is None or together is None or not joined.splits(outputs):
                return
            if torch.allclose(together, apart, rtol=1e-4, atol=1e-6):
                self._parts = joined._parts

    def take_apart(self) -> bool:
        was_joined = self._parts is not self._run
        self._parts = self._run
        return was_joined

    @property
    def numbers(self) -> int:
        return max(int(part.where.stop) for part in self._parts)

    def run(self) -> Tensor:
        found = torch.empty(self.numbers, device=self._objective.model.device)
        told = self._objective.events.over(
            "outputs of rows", self._run, sum(part.n for part in self._run), lambda part: part.n
        )
        for part in told:
            flat = flatten(run_model(self._objective, part.batch, self._seed))
            if len(flat) != part.where.stop - part.where.start:
                raise TaskError("predict() gives outputs whose size depends on the weights")
            found[part.where] = flat
        return found

    linear_outputs = run

    @property
    def batches(self) -> list[Nest]:
        return [part.batch for part in self._run]

    def around(self, flat: Tensor) -> tuple[Outputs, Tensor]:
        return self, self.at(flat)

    def loss(self, outputs: Tensor) -> float:
        with torch.no_grad():
            return sum(
                share * float(self._part_loss(part, outputs[part.where].clone()))
                for part, share in self._shares()
            )

    def loss_and_gradient(self, outputs: Tensor) -> tuple[float, Tensor]:
        gradient, total = torch.zeros_like(outputs), 0.0
        for part, share in self._shares():
            with torch.enable_grad():  # one batch's graph at a time
                leaf = outputs[part.where].detach().requires_grad_(True)
                # not the leaf itself: a loss may work in place
                loss = share * self._part_loss(part, leaf.clone())
                self._objective.backward(loss)
            if leaf.grad is not None:
                gradient[part.where] = leaf.grad
            total += float(loss.detach())
        return total, gradient

    def gradients(self, mixed: Tensor, columns: slice, factors: Tensor) -> Tensor:  # noqa: ARG002
        """The gradient of a batch's mean has those of its rows, and a factor for each number makes
        any other mean of them, where the loss splits into rows, or of batches.
        """
        gradients = torch.zeros_like(mixed)
        for part in self._parts:
            with torch.enable_grad():  # one batch's graph at a time
                leaf = mixed[:, part.where].detach().requires_grad_(True)
                # not the leaf itself: a loss may work in place
                total = torch.stack([self._part_loss(part, one.clone()) for one in leaf]).sum()
                self._objective.backward(total)
            if leaf.grad is not None:
                gradients[:, part.where] = leaf.grad
        return gradients.mul_(factors)

    def factors(self, shares: Tensor, by_row: bool) -> Tensor:
        device = self._objective.model.device
        if not by_row:
            sizes = torch.tensor([part.where.stop - part.where.start for part in self._parts])
            return shares.float().repeat_interleave(sizes, 1).to(device)
        found = torch.empty(len(shares), self.numbers, device=device)
        for part, share in zip(self._parts, torch.split(shares, self.counts, 1), strict=True):
            for where, leaf in part.leaves():
                factor = (part.n * share).float().repeat_interleave(leaf.numel() // part.n, 1)
                found[:, where] = factor.to(found.device)
        return found

    @property
    def is_by_row(self) -> bool:
        return all(has_rows(leaf, part.n) for part in self._parts for _, leaf in part.leaves())

    def _shares(self) -> Iterator[tuple[Part, float]]:
        """The batches that have rows, each with its share of all rows."""
        total = sum(part.count for part in self._parts)
        return ((part, part.count / total) for part in self._parts if part.count > 0)

    def _part_loss(self, part: Part, outputs: Tensor) -> Tensor:
        # the batch's containers anew: a loss may pop from them
        batch = to_device(part.batch, outputs.device)
        loss = self._objective.loss(part.outputs(outputs), batch).reshape(())
        return loss if loss.device.type == "mps" else loss.double()  # which has no float64

    @property
    def counts(self) -> list[int]:
        return [part.count for part in self._parts]

    def on(self, times: Tensor) -> Self:
        split = zip(self._parts, torch.split(times.long(), self.counts), strict=True)
        return self._with(
            [part.take(torch.arange(part.n).repeat_interleave(t)) for part, t in split]
        )

    def on_batches(self, chosen: Tensor) -> Self:
        return self._with([p for p, is_in in zip(self._parts, chosen, strict=True) if is_in])

    def _with(self, parts: list[Part]) -> Self:
        other = copy(self)
        other._parts = parts
        return other

    def unit_losses(self, outputs: Tensor) -> Tensor | None:
        found = []
        with torch.no_grad():
            for part in self._parts:
                nest = part.outputs(outputs[part.where])
                batch = to_device(part.batch, outputs.device)
                each = row_losses(self._objective.loss, nest, batch, part.count)
                if each is None:
                    return None
                found.append(each.cpu())
        together = torch.cat(found)
        whole = torch.tensor(self.loss(outputs)).double()
        same = torch.allclose(together.mean(), whole, rtol=1e-4, atol=1e-6)
        return together if same else None

    def batch_losses(self, outputs: Tensor) -> Tensor:
        found = [self._with([part]).loss(outputs) for part in self._parts]
        return torch.tensor(found, dtype=torch.float64)

    def splits(self, outputs: Tensor) -> bool:
        each = self.unit_losses(outputs)
        if each is None:
            return False
        by_batch = torch.split(each, self.counts)
        if len(each) > len(by_batch) and all(bool((x == x[0]).all()) for x in by_batch):
            return False  # a loss that was computed before it was split is the same for each row
        for part, whole in zip(self._parts, self.batch_losses(outputs).tolist(), strict=True):
            if part.n < 2:
                continue
            halves = [
                part.take(index) for index in torch.arange(part.n).tensor_split([part.n // 2])
            ]
            try:
                losses = [half.count * self._with([half]).loss(outputs) for half in halves]
            except Exception:  # whatever the user's loss makes of half a batch
                return False
            if not abs(sum(losses) / part.n - whole) <= 1e-6 + 1e-4 * abs(whole):
                return False
        return True

    def _mixed_up_losses(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        # each made anew: thirty-nine copies of the data would not fit
        alike = self._alike()
        return torch.tensor(
            [self._mixed_up(alike, generator).loss(outputs) for _ in range(MIXINGS)]
        )

    def _mean_over_rows(self, outputs: Tensor) -> Tensor | None:
        if not self.is_by_row:
            return None
        found, alike = torch.empty_like(outputs), dict[Any, list[tuple[slice, int]]]()
        for part in self._parts:
            for place, (where, leaf) in enumerate(part.leaves()):
                alike.setdefault((place, leaf.shape[1:]), []).append((where, part.n))
        for some in alike.values():
            rows = torch.cat([outputs[where].view(n, -1) for where, n in some])
            for where, n in some:
                found[where] = rows.mean(0).repeat(n)
        return found

    def _unmoved(self, outputs: Tensor) -> Labels:
        alone = all(n == 1 for n in self.counts) and len(self._alike()) == len(self._parts)
        return "matter" if alone or self._sees_constants(outputs) else "unseen"

    def _sees_constants(self, outputs: Tensor) -> bool:
        """Whether the loss depends on something that is the same in every row, as labels may be.

        Mixing rows cannot tell; other values can.
        """
        firsts, constant = dict[int, Tensor](), dict[int, bool]()
        for part in self._parts:
            for place, leaf in enumerate(tensors(part.batch)):
                if has_rows(leaf, part.n):
                    first = firsts.setdefault(place, leaf[0])
                    same = leaf.shape[1:] == first.shape and bool((leaf == first).all())
                    constant[place] = constant.get(place, True) and same
        loss = self.loss(outputs)
        for place in (place for place, is_it in constant.items() if is_it):
            parts = [replace(part, batch=_altered(part.batch, place)) for part in self._parts]
            try:
                if self._with(parts).loss(outputs) != loss:
                    return True
            except Exception:  # whatever the user's loss makes of it, it has looked
                return True
        return False

    def _mixed_up(self, alike: list[list[int]], generator: torch.Generator) -> Self:
        """All outputs, each with another row: of another batch too, where that has its shapes."""
        if self.groups is not None:
            return self._with_groups_mixed_up(self.groups, alike, generator)
        order = list(range(len(self._parts)))
        for group in alike:
            for place, drawn in enumerate(torch.randperm(len(group), generator=generator).tolist()):
                order[group[place]] = group[drawn]
        mixed = [part.take(torch.randperm(part.n, generator=generator)) for part in self._parts]
        return self._with(
            [
                replace(part, batch=mixed[i].batch)
                for part, i in zip(self._parts, order, strict=True)
            ]
        )

    def _with_groups_mixed_up(
        self, groups: Tensor, alike: list[list[int]], generator: torch.Generator
    ) -> Self:
        """Keep the rows of a group together: they are alike, so mixing them would change little."""
        parts, of = list(self._parts), torch.split(groups, self.counts)
        for places in alike:
            joined = join_rows([parts[p].batch for p in places], [parts[p].n for p in places])
            apart = [([p], parts[p].batch) for p in places]
            for some, batch in apart if joined is None else [(places, joined)]:
                counts = [parts[p].n for p in some]
                index = _mix_groups(torch.cat([of[p] for p in some]), generator)
                for p, own in zip(some, torch.split(index, counts), strict=True):
                    parts[p] = replace(parts[p], batch=take_rows(batch, sum(counts), own))
        return self._with(parts)

    def _alike(self) -> list[list[int]]:
        """Places of batches with the same shapes throughout."""
        groups: dict[str, list[int]] = {}
        for place, part in enumerate(self._parts):
            shapes = str(shapes_of((part.template, part.batch), all_of=True))
            groups.setdefault(shapes, []).append(place)
        return list(groups.values())


def _mix_groups(groups: Tensor, generator: torch.Generator) -> Tensor:
    """A permutation of rows [n]: groups in one random order take the place of those in another."""
    one, two = (
        torch.randperm(int(groups.max()) + 1, generator=generator)[groups].argsort(stable=True)
        for _ in range(2)
    )
    index = torch.empty_like(one)
    index[one] = two
    return index


def _joined(group: list[Part]) -> list[Part]:
    """One part of all, or the same ones if they are not of one shape."""
    # one leaf alone stands in [O] as it would if the batches were one
    is_one_leaf = all(len(tensors(part.template)) == 1 for part in group)
    if len(group) == 1 or not is_one_leaf:
        return group
    counts = [part.n for part in group]
    template = join_rows([part.template for part in group], counts)
    batch = join_rows([part.batch for part in group], counts)
    if template is None or batch is None:
        return group
    where = slice(group[0].where.start, group[-1].where.stop)
    return [Part(batch, sum(counts), where, template)]


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
        seed_torch(seed)
        outputs = objective.outputs(batch)
    return change(outputs, lambda x: x.detach().clone() if isinstance(x, Tensor) else WALK)


def flatten(nest: Nest) -> Tensor:
    """All floating-point leaves, one after the other, float32 [o]."""
    floats = [x.detach().reshape(-1).float() for x in tensors(nest) if x.is_floating_point()]
    return torch.cat(floats) if floats else torch.empty(0)


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


def _altered(batch: Nest, place: int) -> Nest:
    """With other values in one of its tensors, such as a label could have."""
    places = count()

    def alter(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return WALK
        if next(places) != place:
            return item
        return item + 1 if item.is_floating_point() else (item == 0).to(item.dtype)

    return change(batch, alter)
