"""torch.distributed.checkpoint: a folder of *.distcp files and `.metadata`, as FSDP runs save it.

`.metadata` is a pickle, which torch would load without question. Here it makes no object of any
class but one of our own, which does nothing; what is needed is copied out of those once. Tensors
are read by the byte ranges that it names, with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sewa_cli.checkpoints.checkpoint import Header, TensorInfo
from sewa_cli.checkpoints.pytorch import STATE_KEYS, STEP_KEYS, load_plain, word_of
from sewa_cli.dtypes import DTYPES, Array, as_array
from sewa_cli.errors import CheckpointError, ConfigError, Unfinished

if TYPE_CHECKING:
    from torch import Tensor

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
_FAULTS = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # of another making

# numbers, text, lists, dicts; what makes or changes an object is below
_PLAIN = """
    PROTO FRAME STOP MARK POP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL
"""
_CODES = [getattr(pickle, name)[0] for name in _PLAIN.split()]


@dataclass(slots=True, eq=False)
class _Record:
    """Stands for any class of the metadata, and with `args` for an object of it. Does nothing."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


class _Refused(pickle.UnpicklingError): ...


class _Unpickler(pickle._Unpickler):
    """Python's own one, not that in C: no opcode of it can do more than is listed here."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> _Record:
        is_dtype = module == "torch" and _DTYPE.fullmatch(name)
        is_path = module in ("pathlib", "pathlib._local")  # where it was saved
        if not (is_dtype or is_path or (module, name) in _ALLOWED):
            raise _Refused(f"{module}.{name}")
        return _Record(name)

    def make(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not _Record or kind.args is not None or type(args) is not tuple:
            raise TypeError("only classes make objects")
        self.stack.append(_Record(kind.name, args))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not _Record or target.args is None:
            raise _Refused("changes to a class or a function")
        target.state = state

    def set_item(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().dispatch[pickle.SETITEM[0]](self)  # type: ignore[arg-type]

    def set_items(self) -> None:
        self._check_keys(self.stack[::2])
        super().dispatch[pickle.SETITEMS[0]](self)  # type: ignore[arg-type]

    def _check_keys(self, keys: Iterable[object]) -> None:
        if not all(type(key) in (str, int, _Record) for key in keys):
            raise TypeError("keys are text")  # to hash a tuple as deep as can be ends the process

    dispatch = {code: pickle._Unpickler.dispatch[code] for code in _CODES} | {  # type: ignore[assignment]
        pickle.REDUCE[0]: make,
        pickle.NEWOBJ[0]: make,
        pickle.BUILD[0]: build,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


class _Place(NamedTuple):
    file: str
    offset: int
    length: int


class _Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Entry(NamedTuple):
    info: TensorInfo
    chunks: dict[_Chunk, _Place]


class _Metadata:
    """A copy of what `.metadata` says, in plain values."""

    def __init__(self, content: Any) -> None:
        fields = _fields(content, "Metadata")
        self.entries: dict[str, Any] = fields["state_dict_metadata"]
        self._ways = fields.get("planner_data") or {}
        if type(self.entries) is not dict or not all(type(key) is str for key in self.entries):
            raise TypeError("entries")
        self.places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for key, value in fields["storage_data"].items():
            index, about = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
            offsets = index.get("offset")
            place = _Place(about["relative_path"], *_sizes((about["offset"], about["length"])))
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

    def tensor(self, key: str) -> _Entry:
        """Its chunks lie in it, fill it by their volume, and have that many bytes in the files."""
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
            chunk = _Chunk(_sizes(about["offsets"]), _sizes(about["sizes"]))
            boxes = zip(*chunk, info.shape, strict=True)
            place = self.places[key, chunk.offsets]  # the first that is not there ends it
            if any(at + size > whole for at, size, whole in boxes) or chunk in chunks:
                raise ValueError(key)
            if prod(chunk.sizes) * width > place.length:
                raise ValueError(key)
            chunks[chunk] = place
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(info.shape):
            raise ValueError(key)
        return _Entry(info, chunks)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """What an object of this class was saved with."""
    if type(value) is not _Record or value.name != kind or type(value.state) is not dict:
        raise TypeError(kind)
    return value.state


def _sizes(value: Any) -> tuple[int, ...]:
    """torch.Size, or numbers alike."""
    numbers = value.args[0] if isinstance(value, _Record) and value.args else value
    if type(numbers) is not tuple or len(numbers) > _MOST:
        raise TypeError("sizes")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("sizes")
    return numbers


class _Stored:
    def __init__(self, folder: Path, entries: Mapping[str, _Entry], base: Path) -> None:
        self._folder = folder
        self._base = base
        self._entries = entries

    def read(self, name: str) -> Tensor:
        try:
            return self._read(*self._entries[name])
        except Exception as error:  # spoilt bytes fail in many ways
            reason = " ".join(str(error).split())[:160]
            raise CheckpointError(f"{self._folder}: {name}: cannot be read: {reason}") from error

    def _read(self, info: TensorInfo, chunks: Mapping[_Chunk, _Place]) -> Tensor:
        import torch

        target, filled = None, None
        for chunk, place in chunks.items():
            part = _load(self._base / self._folder, place)
            if type(part) not in (torch.Tensor, torch.nn.Parameter):
                raise ValueError("is not a tensor")
            part = torch.Tensor.detach(part)
            if part.layout != torch.strided or part.is_quantized or part.is_meta:
                raise ValueError("is sparse, quantised or without data")
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
        if target is None or filled is None or not filled.all():  # volumes alone do not tell
            raise ValueError("has chunks that overlap")
        return target

    def read_array(self, name: str) -> Array:
        return as_array(self.read(name))


def _load(folder: Path, place: _Place) -> Any:
    with (folder / place.file).open("rb") as file:
        file.seek(place.offset)
        return load_plain(io.BytesIO(file.read(place.length)))


def open_folder(folder: Path, state_key: str | None = None) -> Header:
    try:
        return _open(folder, state_key)
    except _FAULTS as error:
        raise _not_metadata(folder) from error


def _not_metadata(folder: Path) -> CheckpointError:
    path = folder / METADATA
    return CheckpointError(f"{path}: is not the metadata of a distributed checkpoint")


def _open(folder: Path, state_key: str | None) -> Header:
    metadata = _read_metadata(folder)
    files = _check_files(folder, metadata)
    ways = {
        key: metadata.way(key)
        for key in sorted(metadata.entries)
        if metadata.is_a("TensorStorageMetadata", key)
    }
    prefix = _prefix(folder, ways, state_key)
    tensors = {
        ".".join(way[len(prefix) :]): metadata.tensor(key)
        for key, way in ways.items()
        if way[: len(prefix)] == prefix and (prefix or len(way) == 1)
    }
    infos = {name: tensors[name].info for name in sorted(tensors)}
    step = next((n for w in STEP_KEYS if (n := _number(folder, metadata, w)) is not None), None)
    return Header(infos, files, partial(_Stored, folder, tensors), step=step)


def files_in(folder: Path) -> tuple[Path, ...]:
    try:
        return _check_files(folder, _read_metadata(folder))
    except _FAULTS as error:
        raise _not_metadata(folder) from error


def _read_metadata(folder: Path) -> _Metadata:
    path = folder / METADATA
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except _Refused as error:
        raise CheckpointError(
            f"{path}: needs {error} to be loaded, which could run code; refused, nothing of it was "
            "run; save its weights as safetensors where you trust it"
        ) from None
    except Exception as error:  # a torn pickle fails in many ways
        raise Unfinished(f"{path}: not a whole file ({error!r}); save it again") from error
    return _Metadata(content)


def _check_files(folder: Path, metadata: _Metadata) -> tuple[Path, ...]:
    """Every file that the metadata name is in the folder, and long enough for all its ranges."""
    ends: dict[str, int] = {}
    sums: dict[str, int] = {}
    for name, offset, length in metadata.places.values():
        is_plain = name == Path(name).name and name.strip(".") and "\\" not in name
        if not is_plain or not name.isprintable() or len(name) > 100:
            raise CheckpointError(
                f"{folder / METADATA}: names {name!r}, which is not a file in its folder; refused"
            )
        ends[name] = max(ends.get(name, 0), offset + length)
        sums[name] = sums.get(name, 0) + length
    for name, end in sorted(ends.items()):
        file = folder / name
        if file.is_symlink() and Path(os.path.realpath(file)).parent != folder.resolve():
            raise CheckpointError(f"{file}: is a link out of its folder; put the file itself there")
        if not file.is_file():
            raise Unfinished(f"{file}: is missing, but {METADATA} names it")
        if (size := file.stat().st_size) < end:
            raise Unfinished(f"{file}: is cut short: {size} bytes of {end}; save it again")
        if size < sums[name]:  # each tensor has bytes of its own
            raise CheckpointError(
                f"{file}: has {size} bytes for {sums[name]} that {METADATA} names"
            )
    return (folder / METADATA, *(folder / name for name in sorted(ends)))


def _prefix(
    folder: Path, ways: Mapping[str, tuple[str, ...]], state_key: str | None
) -> tuple[str, ...]:
    """Where the model's weights are: under a known key, the one that was named, or at the top."""
    tops = dict.fromkeys(way[0] for way in ways.values() if len(way) > 1)
    if state_key is not None:
        wanted = tuple(state_key.split("."))
        if not any(way[: len(wanted)] == wanted for way in ways.values()):
            there = ", ".join(tops) or "only the weights themselves"
            raise ConfigError(f"{folder}: --state-key: no {state_key} in it; it holds {there}")
        return wanted
    known = [key for key in STATE_KEYS if key in tops]
    if len(known) > 1:
        raise ConfigError(
            f"{folder}: has a state dict under each of {', '.join(known)}; name one with "
            "--state-key"
        )
    if known:
        return (known[0],)
    if any(len(way) == 1 for way in ways.values()):
        return ()
    raise CheckpointError(
        f"{folder}: no state dict under {', '.join(STATE_KEYS)}; it holds {', '.join(tops)}; name "
        "the key with --state-key"
    )


def _number(folder: Path, metadata: _Metadata, key: str) -> int | None:
    """A plain whole number that was saved along, such as the step."""
    place = metadata.places.get((key, None))
    if place is None or not metadata.is_a("BytesStorageMetadata", key):
        return None
    try:
        value = _load(folder, place)
    except Exception:
        return None  # the folder's name will have it
    return value if type(value) is int else None
