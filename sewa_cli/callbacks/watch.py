"""The loss that averaging would give now, while a model trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from sewa_cli.rng import seeded

log = logging.getLogger(__name__)
Loss = Callable[[nn.Module], float]
WINDOWS: Final = (1, 3, 10)  # of moving averages over interval means


class Watch:
    """Moving averages of the interval means so far, and their losses.

    loss  loss(model) on a small held-out set; called without gradients, with the model in eval
          mode and random numbers of its own
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._intervals = 0
        self._averages: dict[int, list[Tensor]] = {}
        log.setLevel(logging.INFO)
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())

    def report(
        self, model: nn.Module, weights: Sequence[Tensor], mean: Sequence[Tensor], step: int
    ) -> dict[str, float]:
        """Take in the newest interval mean; log one line, and return its numbers.

        weights  the model's own tensors, in which the averages are tried; put back exactly
        """
        self._intervals += 1
        for window in WINDOWS:
            if self._intervals == 1:
                self._averages[window] = [tensor.clone() for tensor in mean]
            else:
                share = max(1 / self._intervals, 2 / (window + 1))
                torch._foreach_lerp_(self._averages[window], list(mean), share)
        now, losses = self._measure(model), {}
        for window in [w for w in WINDOWS if w <= self._intervals]:
            with _replaced(weights, self._averages[window]):
                losses[window] = self._measure(model)
        best = min(losses, key=lambda window: losses[window])
        of = "the newest interval" if best == 1 else f"about {best} intervals"
        change = 100 * (losses[best] / now - 1) if now else 0.0
        text = "step %d: held-out loss %.4g, of an average over %s %.4g (%+.2g %%)"
        log.info(text, step, now, of, losses[best], change)
        return {"watch_loss": now, "watch_average_loss": losses[best]}

    def _measure(self, model: nn.Module) -> float:
        training = [module for module in model.modules() if module.training]
        try:
            model.eval()
            with torch.no_grad(), seeded(0):
                return float(self._loss(model))
        finally:
            for module in training:
                module.training = True


@contextmanager
def _replaced(weights: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    kept = [weight.clone() for weight in weights]
    try:
        for weight, other in zip(weights, others, strict=True):
            weight.copy_(other)
        yield
    finally:
        for weight, own in zip(weights, kept, strict=True):
            weight.copy_(own)
