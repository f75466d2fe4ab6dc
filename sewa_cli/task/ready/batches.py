"""Batches of the ready-made tasks: how they are made, and their loss and metrics.

A batch is a dict: what the model takes, `targets` [n] or [n, T] (-100: none), and
`targets_per_row`, their mean number over *all* rows of the data. In a batch of a language model,
`texts` [n] labels the text that each row was cut from. The loss of a batch is

    sum of the losses of its targets / (n · targets_per_row),

so that the mean over rows, which is what sewa takes, is the mean over all targets: rows with more
tokens count for more, as in a perplexity, whatever the batches. A row's share does not depend on
the rest of its batch, so the loss splits into rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.args import DataArgs, Part
from sewa_cli.task.ready.tables import Row

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = -100
KEPT_BYTES = 2**30
TEXTS = "texts"  # a key of a language model's batches: a label of the text of each row
ROWS = 32  # fine enough to compare averages by pairs, coarse enough for a forward pass
TARGETS = 128  # computed at once: 64 MiB of logits with 128,000 words
Batch = dict[str, Any]
Predict = Callable[[nn.Module, Batch], Tensor]


class LazyBatches(Sequence[Batch]):
    """Batches made one by one; as many as fit into KEPT_BYTES are kept."""

    def __init__(self, makers: Sequence[Callable[[], Batch]]) -> None:
        self._makers = makers
        self._kept: dict[int, Batch] = {}
        self._free = KEPT_BYTES

    @classmethod
    def of(cls, size: int, make: Callable[..., Batch], *columns: Sequence[Any]) -> Self:
        """`make` gets `size` elements of each column."""
        starts = range(0, len(columns[0]), size)
        return cls([partial(make, *(c[start : start + size] for c in columns)) for start in starts])

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: Any) -> Any:
        if index in self._kept:
            return self._kept[index]
        batch = self._makers[index]()
        size = sum(x.nbytes for x in batch.values() if isinstance(x, Tensor))
        if size <= self._free:
            self._free -= size
            self._kept[index] = batch
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))


def functions_of(
    args: DataArgs,
    batches: Mapping[Part, Sequence[Batch]],
    build_model: Callable[[], nn.Module],
    predict: Predict,
    classes: bool,
    head: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Callable[..., Any]]:
    """The functions of a task; `classes`: its targets are such; `head`: of a language model."""
    functions: dict[str, Callable[..., Any]] = {
        f"{part}_data": partial(batches.__getitem__, part) for part in batches
    }
    functions |= {"build_model": build_model, "predict": predict, "loss": loss}
    if classes:
        functions["targets"] = targets
    if args.metrics and classes:
        functions["summarize"] = accuracy if head is None else perplexity
    elif args.metrics:
        functions |= {"observe": deviations, "summarize": mean_absolute_error}
    functions |= head or {}
    if head is not None:
        functions["groups"] = itemgetter(TEXTS)
    scores = Scores(batches, functions, classes, language=head is not None)
    functions |= {"score": scores.score}
    for name, part in (("score_parts", "selection"), ("heldout_parts", "heldout")):
        if part in batches:
            functions[name] = partial(scores.parts, part, args.batch_size)
    return functions


def open_image(row: Row, column: str, folder: Path, mode: str = "RGB") -> Image:
    """Open an image from a path (relative to `folder`), or from the bytes that `datasets` keeps."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise TaskError("images need pillow: pip install pillow") from None
    value = row.get(column)
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        source: Any = io.BytesIO(value["bytes"])
    elif isinstance(value, Mapping):
        source = value.get("path")
    else:
        source = value
    if isinstance(source, str | Path):
        source = folder / source
    try:
        with Image.open(source) as image:
            return image.convert(mode)
    except (OSError, UnidentifiedImageError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "is not an image"
        shown = source if isinstance(source, Path) else type(value).__name__
        raise TaskError(f"{row.where}: {column}: {shown}: {reason}") from error


# ---- loss and metrics ------------------------------------------------------------------------


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy, or squared error if the targets are not classes; 0-d."""
    targets: Tensor = batch["targets"]
    outputs = outputs.float()  # a bf16 model's too, as in transformers
    if targets.is_floating_point():
        total = F.mse_loss(outputs.reshape(targets.shape), targets, reduction="sum")
    else:
        total = F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    return total / _number(batch)


def targets(batch: Batch) -> tuple[Tensor, float]:
    """Return the classes, and the weight of each cross-entropy in the loss."""
    return batch["targets"], 1 / _number(batch)


def _number(batch: Batch) -> float:
    """Return the number of targets if each row had as many as the mean over all rows."""
    per_row: float = batch["targets_per_row"]
    return len(batch["targets"]) * per_row


def deviations(outputs: Tensor, batch: Batch) -> Tensor:
    targets: Tensor = batch["targets"]
    return (outputs.float().reshape(targets.shape) - targets).abs().flatten()


def perplexity(losses: Tensor, right: Tensor) -> dict[str, float]:
    mean, share = losses.double().mean(), right.double().mean()
    return {"perplexity": float(mean.exp()), "token_accuracy": float(share)}


def accuracy(_: Tensor, right: Tensor) -> dict[str, float]:
    return {"accuracy": float(right.double().mean())}


def mean_absolute_error(deviations: Tensor) -> dict[str, float]:
    return {"mean_absolute_error": float(deviations.double().mean())}


# ---- scores of some rows at a time, to choose by -------------------------------------------------


class Rows(NamedTuple):
    """Some rows of a batch."""

    part: str
    batch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Scores:
    """Scores a ready-made task by its batches, and its functions by name.

    A part is at most ROWS rows, as many in each as can be; of a language model it is whole texts. A
    score is a mean over the targets of its rows, so the mean of scores is near the mean over all
    targets, but not quite that where parts differ in their number of targets.

    classes: targets are classes; language: they are tokens.
    """

    batches: Mapping[Any, Sequence[Batch]]
    functions: Mapping[str, Callable[..., Any]]
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
        known = targets != IGNORED
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
