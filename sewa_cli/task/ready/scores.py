"""Scores of some rows at a time, to choose by: accuracy, perplexity, exact match.

A part is at most ROWS rows, as many in each as can be; of a language model it is whole texts. A
score is a mean over the targets of its rows. The mean of all scores is near the mean over all
targets, but not quite that where parts differ in their number of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXTS = "texts"  # a key of a language model's batches: a label of the text of each row
ROWS = 32  # fine enough to compare averages by pairs, coarse enough for a forward pass
TARGETS = 128  # computed at once: 64 MiB of logits with 128,000 words
Batch = dict[str, Any]


class Rows(NamedTuple):
    """Some rows of a batch."""

    part: str
    batch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Scores:
    """Scores a ready-made task by its batches, and its functions by name.

    ignored: the class of a position without a target; classes: targets are classes; language:
    they are tokens.
    """

    batches: Mapping[Any, Sequence[Batch]]
    functions: Mapping[str, Callable[..., Any]]
    ignored: int
    classes: bool
    language: bool

    def parts(self, part: str, batch_size: int) -> list[list[Rows]]:
        """Only the last batch is made to be counted: it may be shorter than the others.

        Of a language model, whole texts: rows of one text depend on each other.
        """
        batches = self.batches[part]
        if self.language:
            return list(_whole_texts(part, [batch[TEXTS].tolist() for batch in batches]))
        counts = [*[batch_size] * (len(batches) - 1), len(batches[-1]["targets"])]
        return [[Rows(part, i, *cut)] for i, count in enumerate(counts) for cut in _cuts(count)]

    @torch.inference_mode()
    def score(self, model: nn.Module, rows: Sequence[Rows]) -> dict[str, float]:
        found = [self._judged(model, some) for some in rows]
        losses, right, exact = (torch.cat(one).double() for one in zip(*found, strict=True))
        if not self.classes:
            return mean_absolute_error(losses)
        scores = perplexity(losses, right) if self.language else accuracy(losses, right)
        return scores | ({"exact_match": float(exact.mean())} if len(exact) else {})

    def _judged(self, model: nn.Module, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each target [t], whether it was found [t], and whether all of a row's [n].

        Of numbers, deviations; of one target in each row, nothing about whole rows.
        """
        device = next((x.device for x in model.parameters()), torch.device("cpu"))
        batch = {
            key: x[rows.start : rows.stop].to(device) if isinstance(x, Tensor) else x
            for key, x in self.batches[rows.part][rows.batch].items()
        }
        targets, none = batch["targets"], torch.zeros(0)
        if not self.classes:
            outputs = self.functions["predict"](model, batch).float().reshape(targets.shape)
            return (outputs - targets).abs().flatten(), none, none
        known = targets != self.ignored
        losses, right = self._of_targets(model, batch, known)
        if targets.ndim == 1:
            return losses, right, none
        wrong = torch.zeros_like(known).masked_scatter(known, ~right)
        return losses, right, ~wrong.flatten(1).any(1)

    def _of_targets(self, model: nn.Module, batch: Batch, known: Tensor) -> tuple[Tensor, Tensor]:
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
    """Cut into the fewest pieces, all nearly of one length."""
    pieces = -(-count // ROWS)
    ends = [count * i // pieces for i in range(pieces + 1)]
    yield from pairwise(ends)


def _whole_texts(part: str, labels: Sequence[Sequence[int]]) -> Iterator[list[Rows]]:
    """Put as many texts into each part as have ROWS rows together, or one text with more.

    `labels`: the text of each row, batch by batch; rows of a text follow each other.
    """
    places = [(i, row, label) for i, own in enumerate(labels) for row, label in enumerate(own)]
    some: list[tuple[int, int]] = []
    for _, found in groupby(places, lambda place: place[2]):
        text = [place[:2] for place in found]
        if some and len(some) + len(text) > ROWS:
            yield _by_batch(part, some)
            some = []
        some += text
    yield _by_batch(part, some)


def _by_batch(part: str, places: Sequence[tuple[int, int]]) -> list[Rows]:
    """Join places (batch, row), which are in order, into few pieces."""
    found = [(i, [row for _, row in own]) for i, own in groupby(places, lambda place: place[0])]
    return [Rows(part, i, own[0], own[-1] + 1) for i, own in found]


# ---- metrics, from the loss of each target and whether it was found ------------------------------


def perplexity(losses: Tensor, right: Tensor) -> dict[str, float]:
    mean, share = losses.double().mean(), right.double().mean()
    return {"perplexity": float(mean.exp()), "token_accuracy": float(share)}


def accuracy(_: Tensor, right: Tensor) -> dict[str, float]:
    return {"accuracy": float(right.double().mean())}


def mean_absolute_error(deviations: Tensor) -> dict[str, float]:
    return {"mean_absolute_error": float(deviations.double().mean())}
