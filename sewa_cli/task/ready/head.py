"""The last layer of a transformers language model, apart from the rest: hidden states ↦ logits.

`features` runs the model up to that layer, `head` is the layer. It is what the model itself calls
its output embeddings, in whatever architecture, with adapters on it or tied to its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.task.ready.batches import Batch

TOKENS = ("decoder_input_ids", "input_ids")
FEW = 8  # tokens to look at
LARGE = 1000.0  # logits at which any cap on them shows: Gemma's is 30


class Head:
    """Splits the models of one task; `inputs` picks what a model takes from a batch."""

    def __init__(self, inputs: Callable[[nn.Module, Batch], Batch]) -> None:
        self._inputs = inputs
        self._is_last: bool | None = None  # nothing is done with the logits after it

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        return {"features": self.features, "head": self.head}

    def head(self, model: nn.Module, features: Tensor) -> Tensor:
        logits: Tensor = _layer(model)(features)
        return logits

    def features(self, model: nn.Module, batch: Batch) -> Tensor | None:
        """[n, T, H]; None if logits are not simply what the layer gives."""
        inputs = self._inputs(model, batch)
        if self._is_last is None:
            self._is_last = _layer(model) is not None and self._look(model, inputs)
        if not self._is_last:
            return None
        hidden, _ = _run(model, inputs, lambda states: states[:, :1])  # all but no logits
        return hidden

    @torch.no_grad()
    def _look(self, model: nn.Module, inputs: Batch) -> bool:
        """At a few tokens of the first row: are the model's logits those of the layer?

        Weights that are not trained give logits near 0, so these states are looked at enlarged too.
        """
        first = {key: x[:1] if isinstance(x, Tensor) else x for key, x in inputs.items()}
        with suppress(Exception):  # whatever such a model makes of states that it did not expect
            hidden, _ = _run(model, first, lambda states: states[:, :1])
            few = hidden[:, :FEW]
            size, most = self.head(model, few).abs().max(), torch.finfo(few.dtype).max / 4
            larger = min(LARGE / float(size), most / float(few.abs().max()))
            sample = torch.cat([few, larger * few], dim=1)
            _, logits = _run(model, first, lambda _: sample)
            expected = self.head(model, sample).float()
            tokens = next(first[key] for key in TOKENS if key in first)
            same = hidden.shape[:2] == tokens.shape and logits.shape == expected.shape
            return same and torch.allclose(logits.float(), expected, rtol=1e-3, equal_nan=True)
        return False


def _layer(model: nn.Module) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _run(model: nn.Module, inputs: Batch, cut: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The states that reach the last layer, and the logits that the model makes of some of them."""
    reached: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        reached.append(args[0])
        return (cut(args[0]), *args[1:])

    hook = _layer(model).register_forward_pre_hook(catch)
    try:
        logits: Tensor = model(**inputs).logits
    finally:
        hook.remove()
    [hidden] = reached
    return hidden, logits
