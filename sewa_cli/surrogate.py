"""Outputs of any average, predicted from one forward pass for each checkpoint.

Around a base b (an average of the checkpoints) the network's outputs on the selection data are
taken as linear in the weights. With a step h towards each checkpoint,

    y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h        [O] numbers, all outputs of all batches
    f(Σ c_i w_i) ≈ Σ c_i y_i                             for Σ c_i = 1

so the y_i are themselves a trajectory, in output space, with the same two products: mixing, and
pulling a gradient back. The user's loss is only ever differentiated in the outputs.

The rows of the data are kept with the outputs, so that a mask can be judged on any sample of
them: on a fold, or on rows drawn with repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from sewa_cli.evaluate import Objective, are_parts, row_losses
from sewa_cli.flat import Layout
from sewa_cli.nest import WALK, Nest, change, rows, take_rows, to_device
from sewa_cli.trajectory import ROWS, Deltas, Trajectory

QUARTERS = 4
MIXINGS = 39  # one in forty is below all of them by luck
SPARE = 6  # float32 vectors of length O besides the cache: the mixture, its gradient, swaps …
_NAME = "outputs"


class TooLittleRoom(ValueError):
    """Not even a row of every batch fits."""


@dataclass
class _Batch:
    """One selection batch, where its outputs stand in [O], and what they look like."""

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
        batches: list[_Batch],
        base: Tensor,
        cache: Trajectory,
        size: Size,
        seed: int,
    ) -> None:
        self.base = base  # f(b) [O]: the true outputs of the base
        self.size = size
        self._objective = objective
        self._batches = batches
        self._cache = cache
        self._seed = seed
        self._frozen = ~torch.isfinite(base)  # -Inf of a masked logit, say: no direction changes it
        self._has_frozen = bool(self._frozen.any())
        self.everything = Sample([None] * len(batches), [b.batch for b in batches])

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
        found = [_outputs(self._objective, part.batch, self._seed) for part in self._batches]
        return torch.cat([_flatten(outputs) for outputs in found])

    def difference(self, gain: int, lose: int) -> Tensor:
        """y_gain − y_lose [O]."""
        c = [0.0] * self.k
        c[gain], c[lose] = 1.0, -1.0
        return self._cache.mix_few(c)

    def _thaw(self, mixed: Tensor) -> Tensor:
        return torch.where(self._frozen, self.base, mixed) if self._has_frozen else mixed

    def loss(self, outputs: Tensor, sample: Sample | None = None) -> float:
        """Of outputs [O], a mean over the rows of the sample."""
        with torch.no_grad():
            return float(self._loss(outputs, sample or self.everything))

    def loss_and_gradient(
        self, coefficients: Tensor, sample: Sample | None = None
    ) -> tuple[float, Tensor]:
        """c [k] → the loss of its predicted outputs, and its gradient in c [k], float64."""
        with torch.enable_grad():
            leaf = self.mix(coefficients).detach().requires_grad_(True)
            # not the leaf itself: a loss may work in place
            loss = self._loss(leaf.clone(), sample or self.everything)
            self._objective.backward(loss)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if self._has_frozen:
            gradient = gradient.masked_fill(self._frozen, 0.0)
        return float(loss.detach()), self._cache.pull_back(gradient[None])[0].double().cpu()

    def _loss(self, outputs: Tensor, sample: Sample) -> Tensor:
        counts = [
            part.n if taken is None else len(taken)
            for part, taken in zip(self._batches, sample.rows, strict=True)
        ]
        total = torch.zeros((), dtype=torch.float64, device=outputs.device)
        for part, taken, batch, n in zip(
            self._batches, sample.rows, sample.batches, counts, strict=True
        ):
            if n == 0:
                continue
            nest = _unflatten(part.template, outputs[part.where])
            if taken is not None:
                nest = take_rows(nest, part.n, taken)
            # its containers anew: a loss may pop from them
            loss = self._objective.loss(nest, to_device(batch, outputs.device))
            total = total + loss.reshape(()).double() * (n / sum(counts))
        return total

    # ---- rows --------------------------------------------------------------------------------

    @property
    def counts(self) -> list[int]:
        return [part.n for part in self._batches]

    def sample(self, rows: Sequence[Tensor | None]) -> Sample:
        """The batches with only these rows."""
        taken = [
            part.batch if index is None else take_rows(part.batch, part.n, index)
            for part, index in zip(self._batches, rows, strict=True)
        ]
        return Sample(list(rows), taken)

    def unit_losses(self, outputs: Tensor) -> Tensor | None:
        """The loss of each row alone [n] float64; None if the loss does not split into rows."""
        found = []
        with torch.no_grad():
            for part in self._batches:
                nest = _unflatten(part.template, outputs[part.where])
                batch = to_device(part.batch, outputs.device)
                each = row_losses(self._objective.loss, nest, batch, part.n)
                whole = self._objective.loss(nest, batch).reshape(()).double()
                if each is None or not are_parts(each, whole):
                    return None
                found.append(each.cpu())
        return torch.cat(found)

    def batch_losses(self, outputs: Tensor) -> Tensor:
        """The loss of each batch [b] float64."""
        found = []
        for number in range(len(self._batches)):
            only: list[Tensor | None] = [torch.arange(0)] * len(self._batches)
            only[number] = None
            found.append(self.loss(outputs, self.sample(only)))
        return torch.tensor(found, dtype=torch.float64)

    def rows_matter(self, seed: int = 0) -> bool:
        """Whether the base's outputs fit their own rows better than rows that were mixed up.

        Labels that were shuffled, or belong to other data, can still be fitted: by being less sure
        of everything. True also where mixing changes nothing at all: the outputs hold the loss.
        """
        generator = torch.Generator().manual_seed(seed)
        own = self.loss(self.base)
        mixed = []
        for _ in range(MIXINGS):
            orders: list[Tensor | None] = [
                torch.randperm(part.n, generator=generator) for part in self._batches
            ]
            sample = Sample([None] * len(orders), self.sample(orders).batches)
            mixed.append(self.loss(self.base, sample))
        unmoved = all(abs(loss - own) <= 1e-9 * abs(own) for loss in mixed)
        return unmoved or own < min(mixed)

    def splits(self) -> bool:
        """Whether some rows of a batch are a batch: the losses of its halves make up its loss."""
        whole = self.batch_losses(self.base)
        for number, part in enumerate(self._batches):
            if part.n < 2:
                continue
            half = torch.arange(part.n) < part.n // 2
            losses = []
            for chosen in (half, ~half):
                index: list[Tensor | None] = [torch.arange(0)] * len(self._batches)
                index[number] = chosen.nonzero().reshape(-1)
                try:
                    losses.append((int(chosen.sum()), self.loss(self.base, self.sample(index))))
                except Exception:  # whatever the user's loss makes of half a batch
                    return False
            together = sum(n * loss for n, loss in losses) / part.n
            if not abs(together - float(whole[number])) <= 1e-6 + 1e-4 * abs(whole[number]):
                return False
        return True


@dataclass
class Scouted:
    """Where to linearise: the best of the mean of all and the means of the run's quarters."""

    base: Tensor  # [P]
    members: list[int]  # whose mean it is
    loss: float
    uniform: Tensor  # the mean of all, [P]
    last: Tensor  # the newest, [P]
    k: int


class _Mean:
    """A mean that grows row by row."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._total: Tensor | None = None

    def add(self, i: int, row: Tensor) -> None:
        self._total = row.clone() if self._total is None else self._total.add_(row)
        self.members.append(i)

    def value(self) -> Tensor:
        if self._total is None:
            raise ValueError("there are no checkpoints")
        return self._total / len(self.members)


def scout(
    checkpoints: Iterable[tuple[int, Tensor]], of: int, judge: Callable[[Tensor], float]
) -> Scouted:
    """Read every checkpoint once; `of`: how many there are at most. `judge`: flat [P] ↦ loss.

    Of a run that jumps between basins, the mean of all may lie in none of them.
    """
    everything, quarter = _Mean(), _Mean()
    last: Tensor | None = None
    found: tuple[float, list[int], Tensor] | None = None

    def consider(mean: _Mean) -> Tensor:
        nonlocal found
        flat = mean.value()
        loss = judge(flat)
        if found is None or not loss >= found[0]:
            found = (loss if isfinite(loss) else inf, mean.members, flat)
        return flat

    for i, row in checkpoints:
        if quarter.members and i * QUARTERS // of != quarter.members[0] * QUARTERS // of:
            consider(quarter)
            quarter = _Mean()
        quarter.add(i, row)
        everything.add(i, row)
        last = row.clone() if last is None else last.copy_(row)
    if len(quarter.members) < len(everything.members):
        consider(quarter)
    uniform = consider(everything)
    assert found is not None
    assert last is not None
    loss, members, base = found
    return Scouted(base, members, loss, uniform, last, len(everything.members))


def build(
    objective: Objective,
    data: Iterable[Nest],
    base: Tensor,
    k: int,
    checkpoints: Callable[[], Iterable[tuple[int, Tensor]]],
    h: float,
    room: int,
    seed: int = 0,
    on_checkpoint: Callable[[int], None] | None = None,
) -> Surrogate:
    """Run the model at the base [P], then once for each of the k checkpoints, in their order.

    `room`: bytes for the cache. It is float32 if that fits, else bfloat16 differences from the
    base's outputs, else fewer rows of the data.
    """
    model = objective.model
    model.module.eval()
    batches = [batch for batch in data if rows(batch) > 0]
    if not batches:
        raise ValueError("there are no rows to take a mean over")
    of_rows = sum(rows(batch) for batch in batches)
    model.set(base)
    numbers, outputs = _outputs_within(objective, batches, k, room, seed)
    if numbers == 0:
        raise ValueError("predict() gives no floating-point tensors, so there is nothing to mix")
    if outputs is None:
        batches = _fewer_rows(batches, room / _least(k, numbers), seed)
        numbers, outputs = _outputs_within(objective, batches, k, room, seed)
        if outputs is None:
            raise TooLittleRoom(
                f"the outputs of {k} checkpoints need {_least(k, numbers)} bytes, "
                f"even on {sum(map(rows, batches))} rows, and there are {room}; raise --memory"
            )
    wide = _need(k, numbers, torch.float32) <= room  # of few checkpoints it is the smaller one

    parts, start = [], 0
    for batch, out in zip(batches, outputs, strict=True):
        where = slice(start, start + len(_flatten(out)))
        parts.append(_Batch(batch, rows(batch), where, _shapes(out)))
        start = where.stop
    at_base = torch.cat([_flatten(out) for out in outputs])
    layout = Layout({_NAME: slice(0, numbers)}, {_NAME: (numbers,)}, numbers, numbers)
    solid = torch.where(torch.isfinite(at_base), at_base, 0.0)
    cache = Trajectory(k, layout, model.device) if wide else Deltas(k, layout, model.device, solid)
    step = torch.empty_like(base)
    for i, row in checkpoints():
        torch.lerp(base, row.to(base.device), h, out=step)
        model.set(step)
        moved = torch.cat([_flatten(_outputs(objective, batch, seed)) for batch in batches])
        if len(moved) != numbers:
            raise ValueError("predict() gives outputs whose size depends on the weights")
        reached = (moved - at_base).div_(h).add_(at_base)
        reached[~torch.isfinite(at_base)] = 0.0  # as it is, whatever the weights
        if cache.append([(_NAME, reached)]) is not None:
            raise ValueError(f"the outputs near checkpoint {i} are NaN or Inf; leave it out")
        if on_checkpoint is not None:
            on_checkpoint(i)
    model.check_untouched()
    dtype = torch.float32 if wide else torch.bfloat16
    size = Size(
        numbers=numbers,
        dtype=str(dtype).removeprefix("torch."),
        bytes=_need(k, numbers, dtype),
        rows=sum(part.n for part in parts),
        of_rows=of_rows,
    )
    return Surrogate(objective, parts, at_base, cache, size, seed)


def _need(k: int, numbers: int, dtype: torch.dtype) -> int:
    """Bytes of a cache of this precision, with what is computed beside it."""
    spare = SPARE + (max(1, min(k, ROWS // 5)) + 1 if dtype == torch.bfloat16 else 0)
    return numbers * (dtype.itemsize * k + 4 * spare)


def _least(k: int, numbers: int) -> int:
    return min(_need(k, numbers, dtype) for dtype in (torch.float32, torch.bfloat16))


def _outputs_within(
    objective: Objective, batches: Sequence[Nest], k: int, room: int, seed: int
) -> tuple[int, list[Nest] | None]:
    """How many numbers the outputs are, and the outputs, if a cache of them fits into `room`."""
    numbers = 0
    kept: list[Nest] | None = []
    for batch in batches:
        out = _outputs(objective, batch, seed)
        numbers += len(_flatten(out))
        fits = _least(k, numbers) <= room
        kept = [*kept, out] if kept is not None and fits else None
    return numbers, kept


def _fewer_rows(batches: Sequence[Nest], share: float, seed: int) -> list[Nest]:
    """That share of every batch, at least a row, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    fewer = []
    for batch in batches:
        n = rows(batch)
        drawn = torch.randperm(n, generator=generator)[: max(1, int(share * n))]
        fewer.append(take_rows(batch, n, drawn.sort().values))
    return fewer


def _shapes(nest: Nest) -> Nest:
    def shape(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return WALK
        return item.to("meta") if item.is_floating_point() else item

    return change(nest, shape)


def _outputs(objective: Objective, batch: Nest, seed: int) -> Nest:
    """Without gradients; the same random numbers each time, or differences would be noise."""
    devices = [objective.model.device] if objective.model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        outputs = objective.outputs(batch)
    return change(outputs, lambda x: x.detach().clone() if isinstance(x, Tensor) else WALK)


def _flatten(nest: Nest) -> Tensor:
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


def _unflatten(template: Nest, flat: Tensor) -> Nest:
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
