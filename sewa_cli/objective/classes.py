"""Which outputs are logits of which classes, where the task says so with `targets(batch)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sewa_cli.errors import TaskError

NO_TARGET = -100


@dataclass(frozen=True)
class Targets:
    """Of one batch. The loss is Σ weights · cross-entropy."""

    where: Tensor  # [t] places in outputs.flatten(0, -2), ascending; only those with a target
    classes: Tensor  # [t]
    weights: Tensor  # [t] float32
    rows: Tensor  # [t] which row of the batch each belongs to

    def __len__(self) -> int:
        return len(self.where)

    @classmethod
    def of(cls, said: Any, n: int) -> Targets:
        """What the task says of a batch of n rows: targets, or (targets, weights)."""
        targets, weights = said if isinstance(said, tuple) else (said, None)
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim == 0:
            raise TaskError("targets() must return classes: an integer tensor, or with weights")
        flat = targets.reshape(-1)
        where = (flat != NO_TARGET).nonzero().reshape(-1)
        if weights is None:
            each = torch.full((len(where),), 1 / max(len(where), 1))
        else:
            each = torch.as_tensor(weights).to(flat.device).expand(targets.shape).reshape(-1)[where]
        return cls(where, flat[where], each.float(), where // max(len(flat) // max(n, 1), 1))
