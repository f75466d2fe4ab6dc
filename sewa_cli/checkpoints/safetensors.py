"""safetensors: one file, or a set of files with an index that says which tensor is in which."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from sewa_cli.checkpoints.checkpoint import Header, TensorInfo, plain_numbers
from sewa_cli.checkpoints.mapped import map_file
from sewa_cli.dtypes import Array
from sewa_cli.errors import CheckpointError, Unfinished

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
INDEX = ".index.json"


class _Mapped:
    """Maps each file at its first tensor."""

    def __init__(self, places: Mapping[str, Path], base: Path) -> None:
        self._places = places  # tensor → file
        self._base = base
        self._handles: dict[Path, Any] = {}
        self._arrays: dict[Path, dict[str, Array]] = {}

    def read(self, name: str) -> Tensor:
        path = self._places[name]
        try:
            if path not in self._handles:
                self._handles[path] = safe_open(self._base / path, framework="pt")
            tensor: Tensor = self._handles[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: cannot be read: {error}") from error
        return tensor

    def read_array(self, name: str) -> Array:
        path = self._places[name]
        if path not in self._arrays:
            self._arrays[path] = map_file(path, self._base)
        try:
            return self._arrays[path][name]
        except KeyError:
            raise CheckpointError(f"{path}: {name}: has changed since it was opened") from None


def open_file(path: Path) -> Header:
    tensors, metadata = _read_header(path)
    places = dict.fromkeys(tensors, path)
    return Header(
        tensors,
        (path,),
        partial(_Mapped, places),
        metadata,
        _step(path, metadata),
        _metrics(metadata),
    )


def open_set(index: Path) -> Header:
    """All shards that the index names; every header must hold what the index says."""
    places = read_index(index)
    shards = sorted(set(places.values()))
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        found, about = _read_header(shard)
        metadata |= about
        expected = {name for name, place in places.items() if place == shard}
        for name in sorted(expected ^ found.keys()):
            who = "holds no" if name in expected else f"{index.name} does not name its"
            raise CheckpointError(f"{shard}: {who} {name}; index and file do not belong together")
        tensors |= found
    files = (index, *shards)
    step = _step(index, metadata)
    return Header(tensors, files, partial(_Mapped, places), metadata, step, _metrics(metadata))


def read_index(index: Path) -> dict[str, Path]:
    """Tensor → file. A name that leads out of the index's folder is refused, not followed."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror or error}") from error
    except ValueError as error:
        raise Unfinished(f"{index}: is not whole JSON; save the checkpoint again") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: has no weight_map, so it is not an index of shards")
    places = {}
    for tensor, name in names.items():
        _check_inside(index, name)
        places[tensor] = index.with_name(name)
    check_there(index, places.values())
    return places


def _check_inside(index: Path, name: object) -> None:
    folder = index.parent.resolve()
    is_plain = isinstance(name, str) and name == Path(name).name and "\\" not in name
    if not is_plain or not str(name).strip("."):
        raise CheckpointError(
            f"{index}: names {name!r}, which is not a file in its own folder; refused"
        )
    if (folder / str(name)).resolve().parent != folder:
        raise CheckpointError(
            f"{index.with_name(str(name))}: is a link out of its folder; put the file itself there"
        )


def check_there(index: Path, files: Iterable[Path]) -> None:
    missing = sorted({file for file in files if not file.is_file()})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Unfinished(f"{missing[0]}: is missing{more}, but {index.name} names it")


def is_ours(path: Path, key: str) -> bool:
    """Whether the metadata of a file has this key; a broken file has none."""
    try:
        with safe_open(path, framework="numpy") as file:
            return key in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False  # opening it will tell what is wrong with it


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
            return tensors, dict(file.metadata() or {})
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or 'no such file'}") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise Unfinished(
            f"{path}: not a whole safetensors file ({reason}); remove it or save it again"
        ) from error


def _step(path: Path, metadata: Mapping[str, str]) -> int | None:
    if "step" not in metadata:
        return None
    try:
        return int(metadata["step"])
    except ValueError:
        raise CheckpointError(
            f"{path}: metadata step: expected a whole number, found {metadata['step']!r}"
        ) from None


def _metrics(metadata: Mapping[str, str]) -> dict[str, float]:
    """JSON under `metrics`, where a trainer has put some there."""
    try:
        found = json.loads(metadata.get("metrics", "{}"))
    except ValueError:
        return {}
    return plain_numbers(found) if isinstance(found, dict) else {}
