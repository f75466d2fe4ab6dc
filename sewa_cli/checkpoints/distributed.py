"""torch.distributed.checkpoint: a folder of *.distcp files and `.metadata`, as FSDP runs save it.

`.metadata` is a pickle, which torch would load without question. Here every object in it becomes an
`Inert`, and what is needed is copied from those once. Tensors are read from the byte ranges that it
names, with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZipFile

from sewa_cli.checkpoints import inert
from sewa_cli.checkpoints.checkpoint import (
    MEAN_STEPS,
    Header,
    Reader,
    TensorInfo,
    neighbours,
    reading,
)
from sewa_cli.checkpoints.inert import Inert, Refused
from sewa_cli.checkpoints.pytorch import (
    REFUSED,
    STEP_KEYS,
    check_dense,
    is_tensor,
    load_plain,
    word_of,
)
from sewa_cli.checkpoints.safetensors import mapped_bytes
from sewa_cli.checkpoints.state import find_weights
from sewa_cli.dtypes import DTYPES, as_array
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, open_regular, read_bytes
from sewa_cli.text import one_line, shown

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_NUMBER = MIB  # in a file
METADATA = ".metadata"
OPTIMIZER = ("optimizer.", "chained_")  # how Megatron's keys begin, which have no ways
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
_PLANNER_CLASSES = {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"}
_ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES} | {
    *(("torch.distributed.checkpoint.planner", name) for name in _PLANNER_CLASSES),
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_DTYPE = re.compile(r"(b?float|complex|bool|bits|q?u?int)\w*")
_MOST = 64  # dimensions of a tensor, levels of a state dict
_MOST_METADATA = 128 * MIB


# ---- .metadata ---------------------------------------------------------------------------------


def _is_allowed(module: str, name: str) -> bool:
    is_dtype = module == "torch" and _DTYPE.fullmatch(name) is not None
    is_path = module in ("pathlib", "pathlib._local")  # where it was saved
    return is_dtype or is_path or (module, name) in _ALLOWED


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
        is_megatrons = type(content).__name__ == "MCoreMetadata"
        fields = _fields(content, "MCoreMetadata" if is_megatrons else "Metadata")
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
        is_state = key.startswith(OPTIMIZER)
        way = self._ways.get(key, ("optimizer", key) if is_state else (key,))
        if type(way) is not tuple or not 0 < len(way) <= _MOST:
            raise TypeError(key)
        if not all(type(part) in (str, int) for part in way):
            raise TypeError(key)
        return tuple(map(str, way))

    def is_a(self, kind: str, key: str) -> bool:
        return isinstance(entry := self.entries.get(key), Inert) and type(entry).__name__ == kind

    def tensor(self, key: str) -> Entry:
        """Checked: its chunks lie inside it, add up to its volume, and have enough bytes each."""
        fields = _fields(self.entries[key], "TensorStorageMetadata")
        properties = fields["properties"]
        dtype = properties.state[0]
        if type(properties).__name__ != "TensorProperties" or not _DTYPE.fullmatch(dtype.__name__):
            raise TypeError(key)
        info = TensorInfo(word_of(dtype.__name__), _sizes(fields["size"]))
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
    if (
        not isinstance(value, Inert)
        or type(value).__name__ != kind
        or type(value.state) is not dict
    ):
        raise TypeError(kind)
    return value.state


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size or a tuple."""
    numbers = value.args[0] if isinstance(value, Inert) and value.args else value
    if type(numbers) is not tuple or len(numbers) > _MOST:
        raise TypeError("sizes")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("sizes")
    return numbers


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        path = folder / METADATA
        raise CheckpointError(
            f"{path}: is not the metadata of a distributed checkpoint; save it again"
        ) from error


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    with reading(path):
        data = read_bytes(path, _MOST_METADATA)
    try:
        content = inert.load(data, _is_allowed)
    except Refused as error:
        raise CheckpointError(
            f"{path}: needs {shown(error, 100)} to be loaded, which could run code; {REFUSED}"
        ) from None
    except Exception as error:  # a torn pickle fails in many ways
        raise Unfinished(f"{path}: not a complete file ({error!r:.160}); save it again") from error
    return Metadata(content)


# ---- tensors -----------------------------------------------------------------------------------


class _Key(str):
    """A tensor's key in the metadata."""


class _Stored(Reader):
    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self._folder = folder
        self._entries = entries
        self._mapped: dict[str, mmap] = {}

    def read(self, name: str) -> Tensor:
        try:
            return self._read(*self._entries[name])
        except Exception as error:  # damaged bytes fail in many ways
            reason = one_line(error, 160)
            raise CheckpointError(
                f"{self._folder}: {shown(name, 100)}: cannot be read: {reason}; save it again"
            ) from error

    def _read(self, info: TensorInfo, chunks: Mapping[Chunk, Place]) -> Tensor:
        import torch

        target, filled = None, None
        for chunk, place in chunks.items():
            part = _load(self._folder, place)
            if not is_tensor(part):
                raise ValueError("is not a tensor")
            part = torch.Tensor.detach(part)
            check_dense(part)
            if (word_of(part.dtype), tuple(part.shape)) != (info.dtype, chunk.sizes):
                raise ValueError(f"is not what {METADATA} says")
            if len(chunks) == 1:
                return part
            if target is None or filled is None:
                target = torch.empty(info.shape, dtype=part.dtype)
                filled = torch.zeros(info.shape, dtype=torch.bool)
            box = tuple(slice(at, at + size) for at, size in zip(*chunk, strict=True))
            target[box] = part
            filled[box] = True
        if target is None or filled is None or not filled.all():  # the volumes do not show it
            raise ValueError("has chunks that overlap")
        return target

    def runs(self, name: str, part: slice | None) -> list[tuple[int, Tensor]] | None:
        """Return one view for each chunk (in `part`) where they are whole rows, as FSDP shards."""
        info, chunks = self._entries[name]
        row = prod(info.shape[1:])
        found: list[tuple[int, Tensor]] = []
        end = 0
        for chunk, place in sorted(chunks.items()):
            start = chunk.offsets[0] * row if chunk.offsets else 0
            stop = start + prod(chunk.sizes)
            if start != end or chunk.sizes[1:] != info.shape[1:]:
                return None
            end = stop
            if part is not None and (stop <= part.start or start >= part.stop):
                continue
            view = None
            with suppress(Exception):  # damaged bytes fail in many ways: `read` will say how
                view = self._view(place, info, chunk)
            if view is None:
                return None
            found.append((start, view))
        return found if end == prod(info.shape) else None

    def _view(self, place: Place, info: TensorInfo, chunk: Chunk) -> Tensor | None:
        """Return a chunk as a flat view of its storage inside the archive in the file.

        The chunk is loaded once, and the view is used only if it has the same bytes.
        """
        import torch

        if place.file not in self._mapped:
            self._mapped[place.file] = mapped_bytes(self._folder / place.file)
        mapped = self._mapped[place.file]
        content = io.BytesIO(mapped[place.offset : place.offset + place.length])
        part: Tensor = load_plain(content)
        if not is_tensor(part) or (word_of(part.dtype), tuple(part.shape)) != (
            info.dtype,
            chunk.sizes,
        ):
            return None
        loaded = as_array(part)
        if loaded.size == 0:
            return part.reshape(-1)
        with ZipFile(content) as archive:
            member = next((m for m in archive.infolist() if m.filename.endswith("/data/0")), None)
        if member is None or member.file_size != loaded.nbytes:
            return None
        names, extra = struct.unpack_from("<HH", content.getbuffer(), member.header_offset + 26)
        at = place.offset + member.header_offset + 30 + names + extra
        if mapped[at : at + loaded.nbytes] != loaded.tobytes():
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            return torch.frombuffer(mapped, dtype=part.dtype, count=part.numel(), offset=at)


def _load(folder: Path, place: Place) -> Any:
    with open_regular(folder / place.file) as file:
        file.seek(place.offset)
        return load_plain(io.BytesIO(file.read(place.length)))


def files_in(folder: Path) -> tuple[Path, ...]:
    with _understood(folder):
        return _check_files(folder, _read_metadata(folder))


def open_folder(folder: Path, state_key: str | None = None) -> Header:
    with _understood(folder):
        return _open(folder, state_key)


def _open(folder: Path, state_key: str | None) -> Header:
    metadata = _read_metadata(folder)
    files = _check_files(folder, metadata)
    content: dict[str, Any] = {}
    for key in sorted(metadata.entries):
        *parents, name = metadata.way(key)
        here = content
        for parent in parents:
            here = here.setdefault(parent, {})
        if name in here:
            raise TypeError(key)
        is_value = metadata.is_a("BytesStorageMetadata", key)
        here[name] = None if is_value else _Key(key)

    def is_weight(key: _Key) -> bool:
        info = metadata.tensor(key).info
        return info.is_float and bool(info.shape)

    state = find_weights(
        folder, content, state_key, lambda value: isinstance(value, _Key), is_weight
    )
    tensors = {name: metadata.tensor(key) for name, key in state.tensors.items()}
    return Header(
        tensors={name: tensors[name].info for name in sorted(tensors)},
        files=files,
        open=partial(_Stored, folder, tensors),
        mean_steps=_number(folder, metadata, MEAN_STEPS),
        step=next((n for w in STEP_KEYS if (n := _number(folder, metadata, w)) is not None), None),
        mapped=False,
        left=state.left_keys(),
        groups=state.groups,
    )


def values_in(folder: Path) -> dict[str, io.BytesIO]:
    """Return the entries that are no tensors, as their bytes."""
    with _understood(folder):
        metadata, found = _read_metadata(folder), {}
        for key in metadata.entries:
            if metadata.is_a("BytesStorageMetadata", key):
                place = metadata.places[key, None]
                with open_regular(folder / place.file) as file:
                    file.seek(place.offset)
                    found[key] = io.BytesIO(file.read(place.length))
        return found


def _check_files(folder: Path, metadata: Metadata) -> tuple[Path, ...]:
    """Every file that the metadata name is in the folder, and long enough for all its ranges."""
    index = folder / METADATA
    files = neighbours(index, [place.file for place in metadata.places.values()])
    ends, sums = Counter[str](), Counter[str]()
    for name, offset, length in metadata.places.values():
        ends[name] = max(ends[name], offset + length)
        sums[name] += length
    for file in files:
        size, end, total = file.stat().st_size, ends[file.name], sums[file.name]
        if size < end:
            raise Unfinished(f"{file}: is cut short: {size} bytes of {end}; save it again")
        if size < total:  # no two tensors share bytes
            raise CheckpointError(
                f"{file}: has {size} bytes where {METADATA} needs {total}; save it again"
            )
    return (index, *files)


def _number(folder: Path, metadata: Metadata, key: str) -> int | None:
    """A whole number that was saved with the weights, such as the step."""
    place = metadata.places.get((key, None))
    if place is None or not metadata.is_a("BytesStorageMetadata", key):
        return None
    if place.length > _LONGEST_NUMBER:
        return None
    try:
        value = _load(folder, place)
    except Exception:
        return None  # there is still the number in the folder's name
    return value if type(value) is int else None
