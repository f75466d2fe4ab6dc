"""The mean of a model's weights over the steps between two saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.callbacks.watch import Loss, Watch
from sewa_cli.checkpoints import means
from sewa_cli.checkpoints.checkpoint import MEAN_STEPS


class IntervalMean:
    """The mean of a model's weights over the optimizer steps since the last save.

    every   take every n-th step into the mean
    device  the place of the mean: "cpu" for host memory; None: where the weights are
    watch   watch(model): the loss on a small held-out set. At each save, one line says what an
            average of the last interval means has

    Call `update` after each optimizer step. `save_weights(…, mean=mean)` writes the mean and begins
    the next. Trained parameters and floating-point buffers are averaged in float32, other tensors
    are the model's newest. If FSDP2 shards the model, each process averages its own shards.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        device: torch.device | str | None = None,
        watch: Loss | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, found {every!r}")
        self.model = unwrap(model)
        self._every = every
        self._device = device
        self._watch = None if watch is None else Watch(watch)
        self.reset()

    def reset(self) -> None:
        """Begin the next interval."""
        self.steps = 0  # that are in the mean
        self._passed = 0  # of the interval
        self._means: list[Tensor] = []
        self._places: list[tuple[dict[str, Any], str]] = []

    def update(self, steps: int = 1) -> None:
        """Take in the weights after an optimizer step; `steps`: the steps since the last call."""
        before, self._passed = self._passed, self._passed + steps
        if self._passed // self._every > before // self._every:
            self._add()

    def _add(self) -> None:
        if not self._places:
            self._places = _averaged(self.model)
        self.steps += 1
        weights = [self._widened(store[key]) for store, key in self._places]
        if self.steps == 1:
            self._means = [weight.clone() for weight in weights]
        elif weights:
            torch._foreach_lerp_(self._means, weights, 1 / self.steps)

    def _widened(self, tensor: Tensor) -> Tensor:
        own = shard_of(tensor.detach())
        return own.to(self._device, own.dtype if own.dtype.itemsize > 4 else torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the means in it; of a sharded model, DTensors."""
        if not self._passed:
            raise ValueError("no step is in the mean; call update() after each optimizer step")
        if not self.steps:  # shorter than `every`
            self._add()
        found: dict[Any, Tensor] = {}
        for (store, key), mean in zip(self._places, self._means, strict=True):
            found[identity(store[key])] = _like(store[key], mean)
        return {
            name.replace("_orig_mod.", ""): found.get(identity(tensor), tensor)
            for name, tensor in self.model.state_dict().items()
            if isinstance(tensor, Tensor)  # and no extra state of some layers
        }

    def watched(self, step: int) -> dict[str, float]:
        """Report what averages would give now, if a loss was given."""
        if self._watch is None or not self._means:
            return {}
        weights = [store[key].detach() for store, key in self._places]
        return self._watch.report(self.model, weights, self._means, step)

    def metadata(self, step: int) -> dict[str, str]:
        """Return the metadata of the mean's file, if it is saved after this step."""
        return {MEAN_STEPS: str(self.steps), means.FROM: str(step - self._passed + 1)}


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def shard_of(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what tied tensors have in common."""
    own = shard_of(tensor.detach())
    return own.data_ptr(), own.shape, own.stride(), own.dtype


def _averaged(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the places of the tensors to average: modules may put new tensors there."""
    places: dict[Any, tuple[dict[str, Any], str]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                is_trained = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
                if is_trained and key not in module._non_persistent_buffers_set:
                    places.setdefault(identity(tensor), (store, key))
    return list(places.values())


def _like(tensor: Any, mean: Tensor) -> Tensor:
    """Return a mean in the dtype of the model's tensor; of a DTensor, as a DTensor."""
    mean = mean.to(tensor.dtype)
    if not hasattr(tensor, "to_local"):
        return mean
    from torch.distributed.tensor import DTensor

    own = mean.to(shard_of(tensor).device)
    shape, stride = tensor.shape, tensor.stride()
    made: Tensor = DTensor.from_local(
        own, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return made
