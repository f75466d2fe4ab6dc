"""The scales: losses of a model on batches, weighted by rows, and BatchNorm statistics.

Gets callables and tensors only; what the callables are (the user's functions) is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.tree import WALK, arrays, change, has_rows, rows, to_device

Batch = Any
Data = Iterable[Batch]


@dataclass
class Passes:
    """How many batches went through the model, and how many back."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class UnitLosses:
    """Losses of whole batches [b] and the rows in each [b]; of single rows [n] where they split."""

    batches: Tensor
    counts: Tensor
    rows: Tensor | None

    @property
    def mean(self) -> float:
        return float(self.batches @ self.counts / self.counts.sum())


@dataclass
class Objective:
    """The user's loss as a function of the model's weights."""

    model: FlatModel
    predict: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]
    backward: Callable[[Tensor], None]
    passes: Passes = field(default_factory=Passes)
    # while a mask is learned BatchNorm takes the batch's own statistics: running ones, averaged,
    # fit no mixture, and least of all one of checkpoints far apart, though they are recomputed for
    # the average in the end
    batch_statistics: bool = False

    def batch_loss(self, batch: Batch) -> Tensor:
        """Mean loss over one batch; 0-d. The batch is left as it was, or it is an error."""
        return self._outputs_and_loss(batch)[1]

    def _outputs_and_loss(self, batch: Batch) -> tuple[Any, Tensor]:
        self.passes.forward += 1
        batch = to_device(batch, self.model.device)  # its containers anew: they may be popped from
        tensors = [x for x in arrays(batch) if isinstance(x, Tensor) and not x.is_inference()]
        versions = [tensor._version for tensor in tensors]  # torch counts in-place changes
        outputs = self.predict(self.model.module, batch)
        loss = self.loss(outputs, batch).reshape(())
        if [tensor._version for tensor in tensors] != versions:
            raise ValueError(
                "predict() or loss() changes the batch in place, so the next pass over it would "
                "see other data; work on a copy (x.clone())"
            )
        return outputs, loss

    def outputs(self, batch: Batch) -> Any:
        """What the model predicts for a batch, for a solver to learn from; one forward pass."""
        self.passes.forward += 1
        with self._learning(batch):
            return self.predict(self.model.module, to_device(batch, self.model.device))

    @contextmanager
    def _learning(self, batch: Batch) -> Iterator[None]:
        layers = []
        if self.batch_statistics and rows(batch) > 1:  # one row has no variance
            layers = list(batchnorm_layers(self.model.module).values())
            layers = [layer for layer in layers if not isinstance(layer, nn.SyncBatchNorm)]
        tracked = [layer.track_running_stats for layer in layers]
        for layer in layers:
            layer.training, layer.track_running_stats = True, False
        try:
            yield
        finally:
            for layer, was_tracked in zip(layers, tracked, strict=True):
                layer.training, layer.track_running_stats = False, was_tracked

    def mean_loss(self, data: Data) -> tuple[float, int]:
        """Mean over all rows of `data` (a short last batch counts less), and the number of rows."""
        self.model.module.eval()
        total, seen = 0.0, 0
        with torch.no_grad():
            for batch in data:
                n = rows(batch)
                if n == 0:  # its mean is NaN, and it weighs nothing
                    continue
                total += n * float(self.batch_loss(batch))
                seen += n
        if seen == 0:
            raise ValueError("there are no rows to take a mean over")
        self.model.check_untouched()
        return total / seen, seen

    def unit_losses(self, data: Data) -> UnitLosses:
        """The loss of every row on its own; of every batch, if the loss is no mean over rows."""
        self.model.module.eval()
        by_row: list[Tensor] = []
        by_batch: list[tuple[float, int]] = []
        splits = True
        with torch.no_grad():
            for batch in data:
                if (n := rows(batch)) == 0:
                    continue
                outputs, loss = self._outputs_and_loss(batch)
                by_batch.append((float(loss), n))
                if splits:
                    batch = to_device(batch, self.model.device)
                    found = row_losses(self.loss, outputs, batch, n)
                    splits = found is not None and are_parts(found, loss.double())
                    if found is not None:
                        by_row.append(found)
        if not by_batch:
            raise ValueError("there are no rows to take a mean over")
        self.model.check_untouched()
        values, counts = (torch.tensor(x, dtype=torch.float64) for x in zip(*by_batch, strict=True))
        return UnitLosses(values, counts, torch.cat(by_row).cpu() if splits else None)

    def loss_and_gradient(self, flat: Tensor, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Loss at the weights `flat` [P] over `batches`, and its gradient [parameters]."""
        self.model.set(flat)
        self.model.zero_gradients()
        counts = [rows(batch) for batch in batches]
        total = torch.zeros((), device=self.model.device)
        for batch, n in zip(batches, counts, strict=True):
            with torch.enable_grad(), self._learning(batch):
                part = self.batch_loss(batch) * (n / sum(counts))
                self.backward(part)
            self.passes.backward += 1
            total += part.detach()
        self.model.check_untouched()
        return total, self.model.collect_gradients()


def are_parts(rows: Tensor, loss: Tensor) -> bool:
    """Whether losses of single rows make up the batch's: their mean is it, and they see the rows.

    A loss that was computed before it was split (in the model itself, say) is the same for each.
    """
    if not torch.allclose(rows.mean(), loss, rtol=1e-4, atol=1e-6, equal_nan=True):
        return False
    return len(rows) == 1 or not bool(torch.isfinite(loss)) or not bool((rows == rows[0]).all())


def row_losses(
    loss: Callable[[Any, Batch], Tensor], outputs: Any, batch: Batch, n: int
) -> Tensor | None:
    """loss(outputs, batch) of each of the n rows alone, [n] float64; None if it cannot be split."""

    tensors: list[Tensor] = []
    change(outputs, lambda x: tensors.append(x) if has_rows(x, n) else WALK)
    if not tensors:  # nothing of the outputs belongs to a row
        return None
    change(batch, lambda x: tensors.append(x) if has_rows(x, n) else WALK)

    def one(*parts: Tensor) -> Tensor:
        left = iter(parts)
        single = change((outputs, batch), lambda x: next(left)[None] if has_rows(x, n) else WALK)
        return loss(*single).reshape(())

    # in one go where the user's loss allows it; row by row is slow, but takes any loss
    with suppress(Exception):
        together: Tensor = torch.func.vmap(one)(*tensors)
        return together.double()
    with suppress(Exception):  # whatever the user's loss makes of a single row
        return torch.stack([one(*(x[i] for x in tensors)) for i in range(n)]).double()
    return None


def cycle(data: Data, device: torch.device) -> Iterator[Batch]:
    """Batches without end, on the device, starting over when `data` is exhausted."""
    while True:
        empty = True
        for batch in data:
            if rows(batch) > 0:
                empty = False
                yield to_device(batch, device)
        if empty:
            raise ValueError("there are no batches")


def batchnorm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }


def recompute_batchnorm(objective: Objective, data: Data) -> int:
    """Set running means and variances to their mean over the batches of `data`; returns its rows.

    Only the BatchNorm layers run in train mode. Each use of a layer weighs by the rows it saw: with
    momentum n_b / (n_1 + … + n_b) the running value is the weighted mean so far. What is too small
    to have a variance is passed over, a layer that is never used keeps its statistics, and
    `num_batches_tracked` is left as it was.
    """
    layers = list(batchnorm_layers(objective.model.module).values())
    seen = 0
    with _tracking(layers) as updates, torch.no_grad():
        for batch in data:
            seen += rows(batch)
            objective.passes.forward += 1
            objective.predict(objective.model.module, to_device(batch, objective.model.device))
    if not any(updates.values()):
        raise ValueError("BatchNorm statistics need batches of two rows or more")
    objective.model.absorb_buffers()
    return seen


@contextmanager
def _tracking(layers: list[_BatchNorm]) -> Iterator[dict[int, int]]:
    """Train mode for `layers`, with the right momentum at each use; counts rows by id of layer."""
    kept = [(layer.momentum, _clone(layer.num_batches_tracked)) for layer in layers]
    seen = {id(layer): 0 for layer in layers}

    def before(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not layer.training:
            raise ValueError(
                "the model is put into eval mode while BatchNorm statistics are recomputed; leave "
                "the mode alone in predict(), or use --bn off"
            )
        x: Tensor = inputs[0]
        assert isinstance(layer, _BatchNorm)
        if x.numel() // layer.num_features < 2:
            layer.training = False  # for this use only
            return
        seen[id(layer)] += x.shape[0]
        layer.momentum = x.shape[0] / seen[id(layer)]

    def after(layer: nn.Module, *_: Any) -> None:
        layer.training = True

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        for layer in layers:
            layer.train()
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for layer, (momentum, tracked) in zip(layers, kept, strict=True):
            layer.eval()
            layer.momentum = momentum
            if tracked is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(tracked)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
