"""Solvers: from a trajectory and a loss to a probability for each checkpoint. Never a path.

A new solver is a module here with a `solve(trajectory, gradient, K, settings, …) -> Solution`, a
settings model in `config`, and a line in `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# flat [P] ↦ (loss at those weights on this iteration's batches, its gradient [parameters])
LossAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Solution:
    probabilities: list[float]  # s, one for each checkpoint
    selected: list[int]  # the K largest, ascending
    history: list[float]  # mean loss over the M samples, by iteration
