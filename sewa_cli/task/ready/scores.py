"""Scores of some rows at a time, to choose by: accuracy, perplexity, exact match.

A part is at most ROWS rows, as many in each as can be: a score is a mean over the targets of its
rows, so that the mean of all scores is near the same over all targets, but where rows differ in
their number of targets not quite that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 32  # fine enough to compare averages by pairs, coarse enough for a forward pass
TARGETS = 128  # logits of so many at once: 64 MiB with 128,000 words
Batch = dict[str, Any]


class Rows(NamedTuple):
    """Some rows of a batch."""

    part: str
    batch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Scores:
    """Of a ready-made task: its batches, and its functions by name.

    ignored: the class of what is no target; language: targets are tokens.
    """

    batches: Mapping[Any, Sequence[Batch]]
    functions: Mapping[str, Callable[..., Any]]
    ignored: int
    language: bool

    def parts(self, part: str, batch_size: int) -> list[Rows]:
        """Only the last batch is made to be counted: it may be shorter than the others."""
        last = len(self.batches[part]) - 1
        counts = [*[batch_size] * last, len(self.batches[part][last]["targets"])]
        return [Rows(part, i, *cut) for i, count in enumerate(counts) for cut in _cuts(count)]

    @torch.inference_mode()
    def score(self, model: nn.Module, rows: Rows) -> dict[str, float]:
        device = next((x.device for x in model.parameters()), torch.device("cpu"))
        batch = {
            key: x[rows.start : rows.stop].to(device) if isinstance(x, Tensor) else x
            for key, x in self.batches[rows.part][rows.batch].items()
        }
        targets: Tensor = batch["targets"]
        if targets.is_floating_point():
            outputs = self.functions["predict"](model, batch).float().reshape(targets.shape)
            return {"mean_absolute_error": float((outputs - targets).abs().mean())}
        known = targets != self.ignored
        losses, right = self._judged(model, batch, known)
        name = "token_accuracy" if self.language else "accuracy"
        scores = {name: float(right.double().mean())}
        if self.language:
            scores["perplexity"] = float(losses.double().mean().exp())
        if targets.ndim > 1:
            wrong = torch.zeros_like(known).masked_scatter(known, ~right)
            scores["exact_match"] = 1 - float(wrong.flatten(1).any(1).double().mean())
        return scores

    def _judged(self, model: nn.Module, batch: Batch, known: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy of each target, and whether its logit is the largest; [t] each."""
        apart = self.functions.get("features")
        features = None if apart is None else apart(model, batch)
        inputs = self.functions["predict"](model, batch) if features is None else features
        pairs = zip(
            inputs.flatten(0, -2)[known.flatten()].split(TARGETS),
            batch["targets"][known].split(TARGETS),
            strict=True,
        )
        losses, right = [], []
        for some, targets in pairs:
            logits = some if features is None else self.functions["head"](model, some)
            losses.append(F.cross_entropy(logits.float(), targets, reduction="none"))
            right.append(logits.argmax(-1) == targets)
        return torch.cat(losses), torch.cat(right)


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    """As few pieces as there can be, each nearly as long as the others."""
    pieces = -(-count // ROWS)
    ends = [count * i // pieces for i in range(pieces + 1)]
    yield from pairwise(ends)
