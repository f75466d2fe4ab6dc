"""A model whose parameters are spread over the ranks, by FSDP2: each holds rows of every one.

Where its forward pass needs them, FSDP gathers a block's parameters and lets go of them again; it
sums gradients up into the same shards. What has fewer rows than there are ranks, or another dtype
than most, is small: every rank has it whole, and buffers too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.errors import TaskError
from sewa_cli.ranks import Ranks

Parallelize = Callable[[nn.Module, Any], Any]
LARGE = 64 * 2**20  # bytes of a model whose blocks are gathered one by one


def shard(
    model: nn.Module, device: torch.device, ranks: Ranks, parallelize: Parallelize | None = None
) -> None:
    """In place; `parallelize`: the user's way to do it, with (model, mesh)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # it would say so in every forward pass; only processes of torchrun come here
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (ranks.size,))
    if parallelize is not None:
        parallelize(model, mesh)
    else:
        whole = set(_kept_whole(model, ranks.size))
        for block in blocks(model):
            fully_shard(block, mesh=mesh, ignored_params=whole)
        fully_shard(model, mesh=mesh, ignored_params=whole)
    for tensor in (*model.parameters(), *model.buffers()):
        if local(tensor) is None and tensor.device != device:
            tensor.data = tensor.data.to(device)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield blocks that are repeated, as a transformer's layers are.

    A block that shares a parameter with the rest is left in the rest. A small model has
    none: gathered whole it is sent once a pass, not block by block there and back.
    """
    if sum(p.nbytes for p in model.parameters()) < LARGE:
        return
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    taken: set[int] = set()
    for module in model.modules():
        if id(module) in taken or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        # plain layers are too small to be gathered one by one
        composed = [child for child in module.children() if any(True for _ in child.children())]
        kinds = Counter(type(child) for child in composed)
        children = [child for child in composed if kinds[type(child)] > 1]
        for child in children:
            inside = Counter(
                id(p) for m in child.modules() for p in m._parameters.values() if p is not None
            )
            if all(uses[key] == count for key, count in inside.items()):
                taken |= {id(one) for one in child.modules()}
                yield child


def let_go(model: nn.Module) -> None:
    """Let go of parameters that FSDP has gathered: their shards are about to change."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _kept_whole(model: nn.Module, size: int) -> Iterator[nn.Parameter]:
    parameters = list(model.parameters())
    sizes = Counter[torch.dtype]()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    usual = sizes.most_common(1)[0][0] if sizes else torch.float32
    for parameter in parameters:
        if parameter.ndim == 0 or parameter.shape[0] < size or parameter.dtype != usual:
            yield parameter


def local(tensor: Tensor) -> Tensor | None:
    """A rank's own rows of it; None: it is whole."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else None


def columns(name: str, tensor: Tensor) -> slice:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    if [*tensor.placements] != [Shard(0)]:
        raise TaskError(
            f"parallelize(): {name} is laid out as {tensor.placements}; only fully_shard along the "
            "first dimension, over all ranks, is understood"
        )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    width = tensor.shape[1:].numel()
    start = min(offset[0], tensor.shape[0]) * width
    return slice(start, start + torch.Size(shape).numel())
