"""The scales: losses of a model on batches, weighted by rows, and BatchNorm statistics.

Gets callables and tensors only; what the callables are (the user's functions) is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sewa_cli.flat import FlatModel

Batch = Any
Data = Iterable[Batch]


@dataclass
class Passes:
    """How many batches went through the model, and how many back."""

    forward: int = 0
    backward: int = 0


@dataclass
class Objective:
    """The user's loss as a function of the model's weights."""

    model: FlatModel
    predict: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]
    backward: Callable[[Tensor], None]
    passes: Passes = field(default_factory=Passes)

    def batch_loss(self, batch: Batch) -> Tensor:
        """Mean loss over one batch; 0-d. The batch is left as it was, or it is an error."""
        self.passes.forward += 1
        batch = to_device(batch, self.model.device)  # its containers anew: they may be popped from
        tensors = [x for x in _arrays(batch) if isinstance(x, Tensor) and not x.is_inference()]
        versions = [tensor._version for tensor in tensors]  # torch counts in-place changes
        loss = self.loss(self.predict(self.model.module, batch), batch).reshape(())
        if [tensor._version for tensor in tensors] != versions:
            raise ValueError(
                "predict() or loss() changes the batch in place, so the next pass over it would "
                "see other data; work on a copy (x.clone())"
            )
        return loss

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

    def loss_and_gradient(self, flat: Tensor, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Loss at the weights `flat` [P] over `batches`, and its gradient [parameters]."""
        self.model.set(flat)
        self.model.zero_gradients()
        counts = [rows(batch) for batch in batches]
        total = torch.zeros((), device=self.model.device)
        for batch, n in zip(batches, counts, strict=True):
            with torch.enable_grad():
                part = self.batch_loss(batch) * (n / sum(counts))
                self.backward(part)
            self.passes.backward += 1
            total += part.detach()
        self.model.check_untouched()
        return total, self.model.collect_gradients()


def rows(batch: Batch) -> int:
    """The number of examples: the first dimension of the first array in the batch."""
    first = next(_arrays(batch), None)
    if first is not None:
        return int(first.shape[0])
    return len(batch) if isinstance(batch, list | tuple) else 1


def _arrays(batch: Batch) -> Iterator[Any]:
    """Everything in the batch with a shape of one dimension or more, outermost first to last."""
    if getattr(batch, "shape", ()):
        yield batch
    elif isinstance(batch, list | tuple | Mapping):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _arrays(item)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch with every tensor on `device`; tuples, lists and dicts are walked."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(move := getattr(batch, "to", None)):  # transformers' BatchEncoding, for one
        return move(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(item, device) for item in batch)
    return batch


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
