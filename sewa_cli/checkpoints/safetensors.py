"""safetensors: one file, or a set of files with an index that says which tensor is in which."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from sewa_cli.checkpoints.checkpoint import (
    Header,
    Reader,
    TensorInfo,
    check_count,
    neighbours,
    plain_numbers,
    read_json,
    reading,
)
from sewa_cli.checkpoints.mapped import map_file
from sewa_cli.dtypes import Array
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, open_regular, parse_json
from sewa_cli.text import one_line, shown, size

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
INDEX = ".index.json"
MOST_HEADER = 32 * MIB
_LIBRARY_MOST = 100_000_000  # beyond that the library refuses a header, and says so


class _Mapped(Reader):
    """Maps each file when its first tensor is read."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places  # tensor → file
        self._handles: dict[Path, Any] = {}
        self._arrays: dict[Path, dict[str, Array]] = {}

    def read(self, name: str) -> Tensor:
        path = self._places[name]
        try:
            if path not in self._handles:
                self._handles[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._handles[path].get_tensor(name)
        # torch's: no room to map so much, a shape that is too large
        except (SafetensorError, OSError, RuntimeError, TypeError) as error:
            what = f"{path}: {shown(name, 100)}: cannot be read"
            raise CheckpointError(f"{what}: {one_line(error, 160)}") from error
        return tensor

    def read_array(self, name: str) -> Array:
        path = self._places[name]
        if path not in self._arrays:
            self._arrays[path] = map_file(path)
        if name not in self._arrays[path]:
            raise CheckpointError(f"{path}: {name}: has changed since it was opened")
        return self._arrays[path][name]


def open_file(path: Path) -> Header:
    tensors, metadata = _read_header(path)
    return _header(path, (path,), tensors, metadata, dict.fromkeys(tensors, path))


def open_set(index: Path) -> Header:
    """All shards that the index names; their headers must hold exactly what the index says."""
    places = read_index(index)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for shard, names in shards_of(places).items():
        found, about = _read_header(shard)
        check_holds(shard, names, found)
        if extra := sorted(found.keys() - names):
            raise _mismatch(shard, f"{index.name} does not list its {shown(extra[0], 100)}")
        tensors |= found
        metadata |= about
    return _header(index, (index, *shards_of(places)), tensors, metadata, places)


def _header(
    path: Path,
    files: tuple[Path, ...],
    tensors: dict[str, TensorInfo],
    metadata: dict[str, str],
    places: Mapping[str, Path],
) -> Header:
    step, metrics = _step(path, metadata), _metrics(metadata)
    return Header(tensors, files, partial(_Mapped, places), metadata, step, metrics)


def read_index(index: Path) -> dict[str, Path]:
    """Tensor → file."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: has no weight_map, so it is not an index of shards")
    check_count(index, names)
    neighbours(index, names.values())
    return {tensor: index.with_name(name) for tensor, name in names.items()}


def shards_of(places: Mapping[str, Path]) -> dict[Path, set[str]]:
    """File → the names of its tensors, sorted by file."""
    shards: dict[Path, set[str]] = {path: set() for path in sorted(set(places.values()))}
    for name, path in places.items():
        shards[path].add(name)
    return shards


def check_holds(shard: Path, names: set[str], found: Mapping[str, Any]) -> None:
    if missing := sorted(names - found.keys()):
        raise _mismatch(shard, f"has no {shown(missing[0], 100)}")


def _mismatch(shard: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{shard}: {what}; index and file do not belong together")


def is_ours(path: Path, key: str) -> bool:
    """Whether a file's metadata has this key; a broken file has none."""
    try:
        with _opened(path) as file:
            return key in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False  # opening it will say what is wrong


def _opened(path: Path) -> Any:
    """The library's handle; of a file with a header that it would take minutes to read, none."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if MOST_HEADER < length <= _LIBRARY_MOST:
            raise OSError(errno.EFBIG, f"has a header larger than {size(MOST_HEADER)}")
    return safe_open(path, framework="numpy")


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    try:
        with reading(path), _opened(path) as file:
            names = file.keys()
            check_count(path, names)
            slices = {name: file.get_slice(name) for name in names}
            tensors = {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
            return tensors, dict(file.metadata() or {})
    except SafetensorError as error:
        reason = shown(str(error).removeprefix("Error while deserializing header: "), 300)
        raise Unfinished(
            f"{path}: not a complete safetensors file ({reason}); remove it or save it again"
        ) from error


def _step(path: Path, metadata: Mapping[str, str]) -> int | None:
    if "step" not in metadata:
        return None
    try:
        return int(metadata["step"])
    except ValueError:
        found = shown(metadata["step"], 40)
        raise CheckpointError(
            f"{path}: metadata step: expected a whole number, found {found!r}"
        ) from None


def _metrics(metadata: Mapping[str, str]) -> dict[str, float]:
    """JSON under `metrics`, if the trainer wrote any."""
    try:
        found = parse_json(metadata.get("metrics", "{}"))
    except ValueError:
        return {}
    return plain_numbers(found) if isinstance(found, dict) else {}
