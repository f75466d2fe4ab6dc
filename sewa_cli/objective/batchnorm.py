"""BatchNorm: the batch's own statistics while learning, running ones recomputed for an average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sewa_cli.errors import TaskError
from sewa_cli.objective.model import batchnorm_layers


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm takes the statistics of each batch; its running ones stay as they are."""
    layers = [x for x in batchnorm_layers(model).values() if not isinstance(x, nn.SyncBatchNorm)]
    tracked = [layer.track_running_stats for layer in layers]
    for layer in layers:
        layer.training, layer.track_running_stats = True, False
    try:
        yield
    finally:
        for layer, was_tracked in zip(layers, tracked, strict=True):
            layer.training, layer.track_running_stats = False, was_tracked


@contextmanager
def tracking(model: nn.Module) -> Iterator[dict[int, int]]:
    """Running means and variances become their mean over the batches that are run in here.

    Only the BatchNorm layers are in train mode. Each use of a layer counts by the rows it saw: with
    momentum n_b / (n_1 + … + n_b) the running value is the weighted mean so far. What is too small
    to have a variance is passed over, a layer that is never used keeps its statistics, and
    `num_batches_tracked` is left as it was. Yields rows seen, by id of the layer.
    """
    layers = list(batchnorm_layers(model).values())
    kept = [(layer.momentum, deepcopy(layer.num_batches_tracked)) for layer in layers]
    seen = {id(layer): 0 for layer in layers}

    def before(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not layer.training:
            raise TaskError(
                "predict(): switches the model to eval mode while BatchNorm statistics are "
                "recomputed; leave out model.eval(), or use --set bn=off"
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
