"""safetensors: one file, or a set of files with an index that says which tensor is in which.

The library checks headers and gives views to torch; NumPy gets copies from it, and bfloat16 not in
every version. So `views` finds the tensors itself: an 8-byte length, a JSON header with offsets,
the tensors' bytes.
"""

from __future__ import annotations

import errno
import mmap
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from sewa_cli.checkpoints.checkpoint import (
    MEAN_STEPS,
    Header,
    Reader,
    TensorInfo,
    check_count,
    neighbours,
    plain_numbers,
    read_json,
    reading,
)
from sewa_cli.dtypes import DTYPES, RESERVED, Array
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, open_regular, parse_json
from sewa_cli.mirrors import bring
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
                bring(path)
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
            self._arrays[path] = _map_file(path)
        if name not in self._arrays[path]:
            raise CheckpointError(f"{path}: {name}: has changed since it was opened; try again")
        return self._arrays[path][name]


# ---- NumPy views of a file's bytes --------------------------------------------------------------


def views(data: bytes | mmap.mmap) -> dict[str, Array]:
    """Every tensor of a file, read-only, in place; ValueError if the bytes are not such a file.

    The file stays mapped as long as any of them is in use.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > len(data) - 8:
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = parse_json(data[8 : 8 + length])
        body = np.frombuffer(data, np.uint8)[8 + length :]
        return {
            name: _view(body, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != RESERVED
        }
    except (struct.error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a safetensors file: {error}") from error


def _view(body: Array, word: str, shape: tuple[int, ...], begin: int, end: int) -> Array:
    dtype = DTYPES[word]
    if not 0 <= begin <= end <= len(body) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"{word} {list(shape)} does not fit into bytes {begin}..{end}")
    return body[begin:end].view(dtype).reshape(shape)


def _map_file(path: Path) -> dict[str, Array]:
    try:
        return views(mapped_bytes(path))
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "; raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
        raise CheckpointError(f"{path}: cannot be read: {reason}{hint}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path}: has changed since it was opened ({error}); try again"
        ) from error


def mapped_bytes(path: Path) -> mmap.mmap:
    """A file's bytes, read-only; OSError if it is not a regular file, or empty."""
    # before Python 3.13 every mapping holds a descriptor, and 1000 checkpoints are not rare
    options: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)
    except OSError as error:
        if error.errno != errno.EMFILE or not _allow_more_files():
            raise
        return mapped_bytes(path)


def _allow_more_files() -> bool:
    """Raise the limit on open files to what the system allows, if it is lower."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such module
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return soft != hard
    return False


# ---- headers -----------------------------------------------------------------------------------


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
    return Header(
        tensors=tensors,
        files=files,
        open=partial(_Mapped, places),
        metadata=metadata,
        step=_whole(path, metadata, "step"),
        mean_steps=_whole(path, metadata, MEAN_STEPS, least=1),
        metrics=_metrics(metadata),
    )


def read_index(index: Path) -> dict[str, Path]:
    """Tensor → file."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{index}: has no weight_map, so it is not an index of shards; save the "
            "checkpoint again"
        )
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
    return CheckpointError(
        f"{shard}: {what}; index and file do not belong together: save both again"
    )


def is_ours(path: Path, key: str) -> bool:
    """Whether a file's metadata has this key; a broken file has none."""
    try:
        with _opened(path) as file:
            return key in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False  # opening it will say what is wrong


def _opened(path: Path) -> Any:
    """The library's handle; of a file with a header that it would take minutes to read, none."""
    with open_regular(path, whole=False) as file:
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


def _whole(path: Path, metadata: Mapping[str, str], key: str, least: float = -inf) -> int | None:
    if key not in metadata:
        return None
    try:
        if (found := int(metadata[key])) < least:
            raise ValueError
    except ValueError:
        text = shown(metadata[key], 40)
        raise CheckpointError(
            f"{path}: metadata {key}: expected a whole number, found {text!r}; save it again"
        ) from None
    return found


def _metrics(metadata: Mapping[str, str]) -> dict[str, float]:
    """JSON under `metrics`, if the trainer wrote any."""
    try:
        found = parse_json(metadata.get("metrics", "{}"))
    except ValueError:
        return {}
    return plain_numbers(found) if isinstance(found, dict) else {}
