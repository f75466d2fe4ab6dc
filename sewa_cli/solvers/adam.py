"""Adam on one short vector."""

from __future__ import annotations

import torch
from torch import Tensor


class Adam:
    """Adam (Kingma and Ba 2015) on one vector of length k, with its usual constants.

    Our own because constructing torch's takes a second of imports, as long as all else together.
    """

    def __init__(self, variable: Tensor, lr: float) -> None:
        self.variable = variable
        self.lr = lr
        self.mean = torch.zeros_like(variable)
        self.square = torch.zeros_like(variable)
        self.steps = 0

    def step(self, gradient: Tensor, beta1: float = 0.9, beta2: float = 0.999) -> Tensor:
        """Changes the variable in place, and returns it."""
        self.steps += 1
        self.mean.lerp_(gradient, 1 - beta1)
        self.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (self.square / (1 - beta2**self.steps)).sqrt_().add_(1e-8)
        self.variable.addcdiv_(self.mean, size, value=-self.lr / (1 - beta1**self.steps))
        return self.variable
