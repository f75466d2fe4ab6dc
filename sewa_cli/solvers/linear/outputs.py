"""A model's outputs on a batch, as one vector and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import WALK, Nest, change


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
