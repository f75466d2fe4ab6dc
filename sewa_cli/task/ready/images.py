"""Images become batches when they are asked for; small data stays decoded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.scoring import Batch
from sewa_cli.task.ready.tables import Row

if TYPE_CHECKING:
    from PIL.Image import Image

KEPT_BYTES = 2**30


class LazyBatches(Sequence[Batch]):
    """Batches made one by one; those that fit into KEPT_BYTES are made once."""

    def __init__(self, makers: Sequence[Callable[[], Batch]]) -> None:
        self._makers = makers
        self._kept: dict[int, Batch] = {}
        self._free = KEPT_BYTES

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


def open_image(row: Row, column: str, folder: Path, mode: str = "RGB") -> Image:
    """A path (relative to `folder`), the bytes that `datasets` keeps, or an image itself."""
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
