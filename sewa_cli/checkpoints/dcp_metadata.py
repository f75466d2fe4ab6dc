"""`.metadata` of a distributed checkpoint, read without running any of it.

It is a pickle, which torch would load without question. Here every object in it becomes a
`_Record`, which does nothing, and what is needed is copied from those once.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sewa_cli.checkpoints.checkpoint import TensorInfo, reading
from sewa_cli.checkpoints.pytorch import REFUSED, word_of
from sewa_cli.dtypes import DTYPES
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, read_bytes
from sewa_cli.text import shown

METADATA = ".metadata"
_METADATA_CLASSES = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
}
_ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_DTYPE = re.compile(r"(b?float|complex|bool|bits|q?u?int)\w*")
_MOST = 64  # dimensions of a tensor, levels of a state dict
_MOST_METADATA = 128 * MIB


class _Record:
    """An object of a class of the metadata: what it was made of. Does nothing."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Refused(pickle.UnpicklingError): ...


class _Unpickler(pickle._Unpickler):
    """Python's own, as the one in C reserves as much memory as a pickle asks for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type[_Record]] = {}  # which the pickle may change

    def find_class(self, module: str, name: str) -> type[_Record]:
        is_dtype = module == "torch" and _DTYPE.fullmatch(name)
        is_path = module in ("pathlib", "pathlib._local")  # where it was saved
        if not (is_dtype or is_path or (module, name) in _ALLOWED):
            raise _Refused(f"{module}.{name}")
        made = type(name, (_Record,), {"name": name})
        return self._classes.setdefault((module, name), made)


class Place(NamedTuple):
    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Entry(NamedTuple):
    info: TensorInfo
    chunks: dict[Chunk, Place]


class Metadata:
    """A copy of what `.metadata` says, in plain values."""

    def __init__(self, content: Any) -> None:
        fields = _fields(content, "Metadata")
        self.entries: dict[str, Any] = fields["state_dict_metadata"]
        self._ways = fields.get("planner_data") or {}
        if type(self.entries) is not dict or not all(type(key) is str for key in self.entries):
            raise TypeError("entries")
        self.places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for key, value in fields["storage_data"].items():
            index, about = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
            offsets = index.get("offset")
            place = Place(about["relative_path"], *_sizes((about["offset"], about["length"])))
            if type(index["fqn"]) is not str or about.get("transform_descriptors"):
                raise TypeError("places")
            self.places[index["fqn"], offsets and _sizes(offsets)] = place

    def way(self, key: str) -> tuple[str, ...]:
        """The keys that led to an entry when it was saved: ("model", "0.weight")."""
        way = self._ways.get(key, (key,))
        if type(way) is not tuple or not 0 < len(way) <= _MOST:
            raise TypeError(key)
        if not all(type(part) in (str, int) for part in way):
            raise TypeError(key)
        return tuple(map(str, way))

    def is_a(self, kind: str, key: str) -> bool:
        return isinstance(entry := self.entries.get(key), _Record) and entry.name == kind

    def tensor(self, key: str) -> Entry:
        """Checked: its chunks lie inside it, add up to its volume, and have enough bytes each."""
        fields = _fields(self.entries[key], "TensorStorageMetadata")
        properties = fields["properties"]
        dtype = properties.state[0]
        if properties.name != "TensorProperties" or not _DTYPE.fullmatch(dtype.name):
            raise TypeError(key)
        info = TensorInfo(word_of(dtype.name), _sizes(fields["size"]))
        width = DTYPES[info.dtype].itemsize if info.dtype in DTYPES else 0
        chunks = {}
        for each in fields["chunks"]:
            about = _fields(each, "ChunkStorageMetadata")
            chunk = Chunk(_sizes(about["offsets"]), _sizes(about["sizes"]))
            boxes = zip(*chunk, info.shape, strict=True)
            place = self.places[key, chunk.offsets]  # fails at the first that is missing
            if any(at + size > whole for at, size, whole in boxes) or chunk in chunks:
                raise ValueError(key)
            if prod(chunk.sizes) * width > place.length:
                raise ValueError(key)
            chunks[chunk] = place
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(info.shape):
            raise ValueError(key)
        return Entry(info, chunks)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes that an object of this class was saved with."""
    if not isinstance(value, _Record) or value.name != kind or type(value.state) is not dict:
        raise TypeError(kind)
    return value.state


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size or a tuple."""
    numbers = value.args[0] if isinstance(value, _Record) and value.args else value
    if type(numbers) is not tuple or len(numbers) > _MOST:
        raise TypeError("sizes")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("sizes")
    return numbers


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        path = folder / METADATA
        raise CheckpointError(f"{path}: is not the metadata of a distributed checkpoint") from error


def read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    with reading(path):
        data = read_bytes(path, _MOST_METADATA)
    try:
        content = _Unpickler(data).load()
    except _Refused as error:
        raise CheckpointError(
            f"{path}: needs {shown(error, 100)} to be loaded, which could run code; {REFUSED}"
        ) from None
    except Exception as error:  # a torn pickle fails in many ways
        raise Unfinished(f"{path}: not a complete file ({error!r:.160}); save it again") from error
    return Metadata(content)
