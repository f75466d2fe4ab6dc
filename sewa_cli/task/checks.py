"""Checks of what the user's functions return: each returns the value, or raises a TaskError."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from sewa_cli.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn


def model(value: Any) -> nn.Module:
    from torch import nn

    if not isinstance(value, nn.Module):
        raise TaskError(f"build_model() must return an nn.Module, found {type(value).__name__}")
    return value


def loss(value: Any) -> Tensor:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TaskError(f"loss() must return a tensor, found {type(value).__name__}")
    if value.numel() != 1:
        raise TaskError(
            f"loss() must return one number, the mean over the batch; "
            f"found a tensor of shape {list(value.shape)}"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise TaskError(
            "loss() has no gradient; remove .detach(), .item(), no_grad or argmax "
            "from predict() and loss()"
        )
    return value


def groups(value: Any) -> list[Hashable]:
    """Return labels, as Python's own numbers where they come as an array."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, list | tuple) or not all(isinstance(x, Hashable) for x in found):
        raise TaskError(
            "groups() must return a list of labels, one for each example of the batch, found "
            f"{type(value).__name__}"
        )
    return list(found)


def cache_key(value: Any) -> str:
    if not isinstance(value, str):
        raise TaskError(f"cache_key() must return text, found {type(value).__name__}")
    return value


def targets(value: Any) -> tuple[Tensor, Tensor | None]:
    """Return classes, and their weights if there are any."""
    import torch

    classes, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(classes, torch.Tensor):
        raise TaskError(
            "targets() must return a tensor of classes, or a pair of one and its weights; found "
            f"{type(classes).__name__}"
        )
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        raise TaskError(f"targets() must return whole numbers, found {classes.dtype}")
    if weights is None or isinstance(weights, torch.Tensor):
        return classes, weights
    if not isinstance(weights, int | float):
        raise TaskError(f"targets(): weights must be a tensor, found {type(weights).__name__}")
    return classes, torch.tensor(float(weights))


def features(value: Any) -> Tensor | None:
    """Allow None, for a model whose outputs are not simply those of a last layer."""
    return None if value is None else _tensor("features", value)


def head(value: Any) -> Tensor:
    return _tensor("head", value)


def _tensor(name: str, value: Any) -> Tensor:
    import torch

    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TaskError(f"{name}() must return a tensor [..., n], found {found}")
    return value


def metrics(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise TaskError(
            f'metrics() must return a dict like {{"accuracy": 0.93}}, found {type(values).__name__}'
        )
    return {str(name): float(value) for name, value in values.items()}
