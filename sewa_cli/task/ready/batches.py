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
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.args import DataArgs, Part
from sewa_cli.task.ready.scores import TEXTS, Scores, accuracy, mean_absolute_error, perplexity
from sewa_cli.task.ready.tables import Row

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = -100
KEPT_BYTES = 2**30
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
    scores = Scores(batches, functions, IGNORED, classes, language=head is not None)
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


def inputs_of(batch: Batch) -> Batch:
    """The part of a batch that is for the model."""
    own = ("targets", "targets_per_row", TEXTS)
    return {key: x for key, x in batch.items() if key not in own}


def deviations(outputs: Tensor, batch: Batch) -> Tensor:
    targets: Tensor = batch["targets"]
    return (outputs.float().reshape(targets.shape) - targets).abs().flatten()
