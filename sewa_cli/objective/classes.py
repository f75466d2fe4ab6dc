"""A loss that is a weighted sum of cross-entropies, taken piece by piece.

    L = Σ_i w_i · CE(z_i, y_i),   z_i ∈ R^V the logits at the i-th place that has a target

A language model's logits are by far its largest tensor: 16 rows of 2,048 tokens and 128,000 words
make 16 GiB. Where the task says what its targets are, they are never all there at once: its `head`
is applied to some of the places at a time, or, where it has none, some rows are run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli.errors import TaskError
from sewa_cli.objective.tree import WALK, Nest, change, rows, take_rows, unchanged
from sewa_cli.rng import seeded

IGNORED = -100  # no target here: as in torch and transformers
# bytes of float32 logits at once; their softmax and its gradient take as much again each. Measured
# with 32,000 words on one core, evaluating: 1.1 s by 32 MiB, 1.4 by 8, 2.1 by 1, all at once 1.8
PIECE = 32 * 2**20
CLOSE = 1e-3  # two ways to one number, in bfloat16 too
LOOKED_AT = 100  # batches; whether the loss is made of the targets may depend on the rows


@dataclass(frozen=True)
class Targets:
    """The places of one batch that have a target."""

    where: Tensor  # [t] in outputs.flatten(0, -2), ascending
    classes: Tensor  # [t]
    weights: Tensor  # [t] float32, loss = Σ weights·CE
    rows: Tensor  # [t] which row of the batch each belongs to
    shape: tuple[int, ...]  # of the outputs, but for V

    @property
    def per_row(self) -> int:
        """Places in a row, with a target or without."""
        return torch.Size(self.shape[1:]).numel()

    @property
    def key(self) -> tuple[int, ...]:
        """Return numbers that differ between batches, but for rare accidents."""
        numbers = self.where * (self.classes + 1)
        return (*self.shape, len(self.where), int(self.classes.sum()), int(numbers.sum()))


@dataclass(frozen=True)
class Stretch:
    """Some of a batch's targets: what the head makes their logits of."""

    part: slice  # of the targets
    inputs: Tensor  # [p, H], or the logits themselves
    head: Callable[[Tensor], Tensor]

    def pieces(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the places of `size` targets at a time, and their inputs."""
        for start in range(0, len(self.inputs), size):
            some = self.inputs[start : start + size]
            at = self.part.start + start
            yield slice(at, at + len(some)), some


@dataclass
class Classes:
    """A task's statement about its cross-entropies. `proven`: it need not be checked."""

    predict: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Tensor]
    find: Callable[[Any], tuple[Tensor, Tensor | None]]  # batch ↦ targets, weights
    features: Callable[[nn.Module, Any], Tensor | None] | None = None
    head: Callable[[nn.Module, Tensor], Tensor] | None = None
    memory_left: int = PIECE
    proven: bool = False
    warn: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._refused = False
        self._apart = True  # rows may be run apart
        self._width: int | None = None  # V
        self._seen: set[tuple[int, ...]] = set()  # batches that were looked at

    def targets(self, module: nn.Module, batch: Nest) -> Targets | None:
        """Return the targets of a batch on the device; None if the loss is not made of them."""
        is_first = self._width is None
        if is_first:
            self._look(module, batch)
        if self._refused:
            return None
        found = self._targets(batch)
        if not self.proven and len(self._seen) < LOOKED_AT and found.key not in self._seen:
            if not is_first:
                self._look_again(module, batch, found)
            self._seen.add(found.key)
        return found

    @property
    def width(self) -> int:
        """V; 0: nobody has looked yet."""
        return self._width or 0

    def at_once(self, memory_left: int) -> int:
        """Targets whose logits fit."""
        assert self._width is not None  # whoever has targets has asked for them
        return max(1, memory_left // (4 * self._width))

    def stretches(
        self,
        module: nn.Module,
        batch: Nest,
        targets: Targets,
        memory_left: int,
        whole: bool = False,
    ) -> Iterator[Stretch]:
        """All targets in order, each stretch from a forward pass; `whole`: rows need each other."""
        if not whole and (hidden := self._hidden(module, batch, targets)) is not None:
            head = self.head
            assert head is not None
            everything = slice(0, len(targets.where))
            taken = hidden.flatten(0, -2)[targets.where]
            yield Stretch(everything, taken, lambda some: head(module, some))
            return
        n = targets.shape[0]
        size = (
            n if whole or not self._apart else max(1, self.at_once(memory_left) // targets.per_row)
        )
        for start in range(0, n, size):
            some = _rows(batch, n, start, start + size)
            with unchanged(some):
                outputs = self._outputs(module, some)
            ends = torch.tensor([start, min(start + size, n)], device=targets.rows.device)
            first, last = torch.searchsorted(targets.rows, ends).tolist()
            _check_shape(outputs, (min(size, n - start), *targets.shape[1:]), "predict")
            places = targets.where[first:last] - start * targets.per_row
            yield Stretch(slice(first, last), outputs.flatten(0, -2)[places], lambda some: some)

    def _hidden(self, module: nn.Module, batch: Nest, targets: Targets) -> Tensor | None:
        """The features, if there are any, and a gradient through them if there should be one."""
        if self.features is None:
            return None
        with unchanged(batch):
            hidden = self.features(module, _anew(batch))
        if hidden is None or (torch.is_grad_enabled() and not hidden.requires_grad):
            return None
        _check_shape(hidden, targets.shape, "features")
        return hidden

    def _outputs(self, module: nn.Module, batch: Nest) -> Tensor:
        return _checked(self.predict(module, batch))

    def _targets(self, batch: Nest) -> Targets:
        n = rows(batch)
        with unchanged(batch, "targets()"):
            found, weights = self.find(_anew(batch))
        if found.ndim == 0 or found.shape[0] != n:
            raise TaskError(
                f"targets() must have the batch's {n} rows first, found shape {list(found.shape)}"
            )
        kept = found != IGNORED
        where = kept.flatten().nonzero()[:, 0]
        classes = found.flatten()[where].long()
        for wrong in classes[(classes < 0) | (classes >= (self._width or torch.inf))].tolist()[:1]:
            raise TaskError(
                f"targets(): {wrong} is not a class: predict() gives {self._width}, numbered from "
                f"0; use {IGNORED} where there is none"
            )
        if weights is None:
            if len(where) == 0:
                raise TaskError("targets(): a batch has no target; leave it out of the data")
            each = torch.full_like(classes, 1 / len(where), dtype=torch.float32)
        else:
            try:
                each = weights.to(found.device, torch.float32).expand(found.shape).flatten()[where]
            except RuntimeError:
                raise TaskError(
                    f"targets(): weights of shape {list(weights.shape)} do not fit targets of "
                    f"shape {list(found.shape)}"
                ) from None
        return Targets(where, classes, each, where // (found.numel() // n), tuple(found.shape))

    # ---- is it so? -----------------------------------------------------------------------------

    @torch.no_grad()
    def _look(self, module: nn.Module, batch: Nest) -> None:
        """At a few rows: V, whether rows can be run apart, and whether what the task says is so.

        As many rows as fit into a piece, but two: a mean of rows' means is no mean over targets.
        """
        n = rows(batch)
        one = _rows(batch, n, 0, 1)
        self._apart = rows(one) == 1
        if self.proven and self.features is not None and self.head is not None:
            hidden = self.features(module, _anew(one))
            if hidden is not None:
                self._width = self.head(module, hidden.flatten(0, -2)[:1]).shape[-1]
                return
        with seeded(0):
            alone = self._outputs(module, _anew(one))
        self._width = alone.shape[-1]
        targets = self._targets(batch)  # its faults first
        _check_shape(alone, (alone.shape[0], *targets.shape[1:]), "predict")
        if self.proven:
            return
        few, outputs, targets, differ = self._compared(module, batch, targets)
        self._apart = self._apart and _close(outputs[:1], alone)
        if differ:
            self._refused = True
            self.warn(f"targets(): {differ}; only loss() is used, with all logits at once")
        elif self.features is not None and self.head is not None:
            with seeded(0):
                hidden = self.features(module, _anew(few))
            if hidden is None:
                return
            _check_shape(hidden, targets.shape, "features")
            if not _close(self.head(module, hidden), outputs):
                self.features = None
                self.warn(
                    "head(features) is not what predict() gives; only predict() is used, some "
                    "examples at a time"
                )

    @torch.no_grad()
    def _look_again(self, module: nn.Module, batch: Nest, targets: Targets) -> None:
        """At a further batch. Numbers of those before are in use: there is no going back."""
        *_, differ = self._compared(module, batch, targets)
        if differ:
            raise TaskError(
                f"targets(): {differ}, in one of the batches, and the same in others; say in "
                "targets() what loss() is made of, with weights, or leave it out"
            )

    def _compared(
        self, module: nn.Module, batch: Nest, targets: Targets
    ) -> tuple[Nest, Tensor, Targets, str]:
        """Some rows, their outputs and targets; how the two losses differ, if they do."""
        n, few = rows(batch), _anew(batch)
        if self._apart:
            size = max(2, self.at_once(self.memory_left) // targets.per_row)
            with_targets = torch.unique(targets.rows).tolist()[:size]
            few = take_rows(batch, n, torch.tensor(sorted({0, *with_targets})))
        with seeded(0):
            outputs = self._outputs(module, _anew(few))
        targets = self._targets(few)
        _check_shape(outputs, targets.shape, "predict")
        logits = outputs.flatten(0, -2)[targets.where].float()
        mine = targets.weights @ F.cross_entropy(logits, targets.classes, reduction="none")
        theirs = self.loss(outputs.clone(), _anew(few)).reshape(()).float()
        differ = ""
        if not torch.isclose(mine, theirs, rtol=CLOSE, atol=1e-6, equal_nan=True):
            differ = (
                f"their cross-entropies sum up to {float(mine):.6g}, but loss() gives "
                f"{float(theirs):.6g}"
            )
        return few, outputs, targets, differ


def losses(logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each [t], and whether its class has the largest logit [t]."""
    return F.cross_entropy(logits, classes, reduction="none"), logits.argmax(-1) == classes


def _rows(batch: Nest, n: int, start: int, stop: int) -> Nest:
    """Some of n rows; their containers are new ones, which may be popped from."""
    if start == 0 and stop >= n:
        return _anew(batch)
    return take_rows(batch, n, torch.arange(start, min(stop, n)))


def _anew(batch: Nest) -> Nest:
    return change(batch, lambda _: WALK)


def _close(one: Tensor, two: Tensor) -> bool:
    """Logits: to a thousandth of the largest."""
    if one.shape != two.shape:
        return False
    size = float(two.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one.float(), two.float(), rtol=CLOSE, atol=CLOSE * size, equal_nan=True)


def _checked(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor) and outputs.ndim > 1:
        return outputs
    found = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise TaskError(f"targets(): predict() must give a tensor [rows, ..., classes], found {found}")


def _check_shape(found: Tensor, shape: tuple[int, ...], name: str) -> None:
    if found.shape[:-1] != shape:
        raise TaskError(
            f"targets() must have the shape of {name}() but for its last dimension: that gives "
            f"{list(found.shape)}, targets {list(shape)}"
        )
