"""`task: classification`: any model function, on arrays (.npz) or a folder of images."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from sewa_cli.errors import TaskError
from sewa_cli.settings import Count, Positive
from sewa_cli.task import default_predict
from sewa_cli.task.ready import Newest, Ready
from sewa_cli.task.ready.args import DataArgs, ModelFunction, Part, find_function, parse
from sewa_cli.task.ready.batches import Batch, LazyBatches, functions_of, open_image
from sewa_cli.task.ready.tables import Labels, Row, note_of_order
from sewa_cli.text import one_line

OF_IMAGES = {"size", "channels", "mean", "std", "classes"}
OF_ARRAYS = {"x", "y", "scale", "loss"}


def _height_and_width(size: object) -> object:
    pair = [size, size] if isinstance(size, int) else size
    whole = isinstance(pair, list) and all(type(side) is int and side > 0 for side in pair)
    if not whole or len(pair) != 2:  # type: ignore[arg-type]
        raise ValueError(f"must be a number of pixels, or [height, width], found {size!r}")
    return pair


class ClassificationArgs(DataArgs):
    """All keys of `args`."""

    model: ModelFunction
    model_args: dict[str, Any] = Field(default_factory=dict)
    batch_size: Count = 256
    limit: Count | None = None
    x: str = "x"
    y: str = "y"
    scale: Positive | None = None
    loss: Literal["cross-entropy", "mse"] = "cross-entropy"
    size: Annotated[tuple[int, int], BeforeValidator(_height_and_width)] | None = None
    channels: Literal[1, 3] = 3
    mean: list[float] | None = None
    std: list[Annotated[float, Field(gt=0)]] | None = None
    classes: list[str] | None = None

    @model_validator(mode="after")
    def _fits_the_data(self) -> Self:
        folders = {path.is_dir() for path in self.sources.values()}
        if len(folders) > 1:
            raise ValueError("the data must be .npz files or folders of images, not both")
        misplaced = (OF_ARRAYS if folders == {True} else OF_IMAGES) & self.model_fields_set
        if misplaced:
            of = "folders of images have" if folders == {True} else ".npz files have"
            raise ValueError(f"{of} no {', '.join(sorted(misplaced))}")
        if folders == {True} and self.size is None:
            raise ValueError("`size` is missing: images are resized to it, 32 or [32, 48]")
        for name, given in (("mean", self.mean), ("std", self.std)):
            if given is not None and len(given) != self.channels:
                raise ValueError(f"`{name}` must be a list of {self.channels} numbers")
        return self


def make(args: Mapping[str, Any], newest: Newest | None = None) -> Ready:
    del newest  # the model is the user's function
    settings = parse(ClassificationArgs, args)
    build = find_function(settings.model)
    read = _read_images if next(iter(settings.sources.values())).is_dir() else _read_arrays
    batches, notes = read(settings)
    classes = settings.loss == "cross-entropy"
    functions = functions_of(
        settings, batches, lambda: build(**settings.model_args), predict, classes
    )
    return Ready(functions, tuple(settings.sources.values()), tuple(notes))


def predict(model: nn.Module, batch: Batch) -> Any:
    return default_predict(model, batch["x"])


# ---- arrays -----------------------------------------------------------------------------------


def _read_arrays(args: ClassificationArgs) -> tuple[dict[Part, Sequence[Batch]], list[str]]:
    batches: dict[Part, Sequence[Batch]] = {}
    notes: list[str] = []
    for part, path in args.sources.items():
        x, y = _open_arrays(path, args.x, args.y)
        drawn = args.draw(part, len(x), notes)
        make = partial(_batch_of_arrays, args, x, _targets(args, path, y))
        batches[part] = LazyBatches.of(args.batch_size, make, drawn)
    return batches, notes


def _open_arrays(path: Path, x: str, y: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read x [n, …] and y [n, …] from an .npz file.

    TaskError if they are missing or differ in length; pickles are refused.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if missing := [name for name in (x, y) if name not in archive]:
                names = ", ".join(archive) or "none"
                raise TaskError(f"{path}: no array {missing[0]!r}; there are {names}")
            inputs, targets = archive[x], archive[y]
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, TypeError) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise TaskError(f"{path}: cannot be read as .npz: {reason}") from error
    for name, array in ((x, inputs), (y, targets)):
        if array.ndim == 0 or len(array) == 0:
            raise TaskError(f"{path}: {name}: holds no rows; name a file with data")
    if len(inputs) != len(targets):
        raise TaskError(
            f"{path}: {len(inputs)} rows of {x}, but {len(targets)} of {y}; give one for each"
        )
    if inputs.dtype.kind not in "fiub":
        raise TaskError(f"{path}: {x}: must be numbers, found {inputs.dtype}")
    return inputs, targets


def _targets(args: ClassificationArgs, path: Path, y: NDArray[Any]) -> Tensor:
    """y as classes, or as numbers for `loss: mse`."""
    if args.loss == "mse":
        return torch.from_numpy(np.array(y, dtype=np.float32))
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise TaskError(
            f"{path}: {args.y}: must be whole numbers, one per row, found {y.dtype} "
            f"{list(y.shape)}; for other targets there is `loss: mse`"
        )
    if y.size and (least := int(y.min())) < 0:
        row = int(y.argmin()) + 1
        raise TaskError(f"{path}: {args.y}: row {row}: {least} is not a class; number them from 0")
    return torch.from_numpy(np.array(y, dtype=np.int64))


def _batch_of_arrays(
    args: ClassificationArgs, x: NDArray[Any], y: Tensor, rows: Sequence[int]
) -> Batch:
    taken = x[np.asarray(rows)]
    if args.scale is not None:
        taken = taken.astype(np.float32) * np.float32(args.scale)
    taken = taken.astype(np.float32 if taken.dtype.kind == "f" else np.int64, copy=False)
    targets = y[torch.tensor(rows)]
    per_row = targets[0].numel() if args.loss == "mse" else 1
    return {"x": torch.from_numpy(taken), "targets": targets, "targets_per_row": float(per_row)}


# ---- images -----------------------------------------------------------------------------------


def _read_images(args: ClassificationArgs) -> tuple[dict[Part, Sequence[Batch]], list[str]]:
    notes: list[str] = []
    columns = ["image", "label"]
    rows = {part: args.take(part, t, columns, notes) for part, t in args.tables().items()}
    names = args.classes
    if names is None:
        folders = {p.name for path in args.sources.values() for p in path.iterdir() if p.is_dir()}
        names = sorted(folders)
        notes.append(note_of_order(names))
    labels = Labels({name: i for i, name in enumerate(names)}, len(names), "the data")
    batches: dict[Part, Sequence[Batch]] = {}
    for part, some in rows.items():
        targets = [labels.number(row, "label", row.get("label")) for row in some]
        make = partial(_batch_of_images, args)
        batches[part] = LazyBatches.of(args.batch_size, make, some, targets)
    return batches, notes


def _batch_of_images(
    args: ClassificationArgs, rows: Sequence[Row], targets: Sequence[int]
) -> Batch:
    x = torch.stack([_pixels(row, args) for row in rows])
    return {"x": x, "targets": torch.tensor(targets), "targets_per_row": 1.0}


def _pixels(row: Row, args: ClassificationArgs) -> Tensor:
    """An image as [channels, height, width], 0 to 1, then (x − mean) / std."""
    assert args.size is not None
    height, width = args.size
    image = open_image(row, "image", Path(), "RGB" if args.channels == 3 else "L")
    array = np.asarray(image.resize((width, height)), dtype=np.float32) / 255
    pixels = torch.from_numpy(array.reshape(height, width, args.channels)).permute(2, 0, 1)
    if args.mean is not None:
        pixels = pixels - torch.tensor(args.mean)[:, None, None]
    if args.std is not None:
        pixels = pixels / torch.tensor(args.std)[:, None, None]
    return pixels.contiguous()
