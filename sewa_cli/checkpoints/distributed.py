"""torch.distributed.checkpoint: a folder of *.distcp files and `.metadata`, as FSDP runs save it.

Tensors come through torch's own reader, however many ranks have written them. Its `.metadata` is a
pickle that torch would load without question; here it may only name the classes that torch itself
puts there.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli.checkpoints.checkpoint import Header, TensorInfo
from sewa_cli.checkpoints.pytorch import STATE_KEYS, STEP_KEYS, word_of
from sewa_cli.dtypes import Array, as_array
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


class _Restricted(pickle.Unpickler):
    """Only classes that hold plain values; a dtype is found under its own name in torch."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local"):
            return _as_text  # where it was saved; a path of another system could not be made here
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _as_text(*parts: str) -> str:
    return "/".join(map(str, parts))


class _Stored:
    """torch's reader, its metadata read once."""

    def __init__(self, folder: Path, keys: Mapping[str, str]) -> None:
        self._folder = folder
        self._keys = keys  # our name → torch's
        self._metadata = _read_metadata(folder)

    def read(self, name: str) -> Tensor:
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        key = self._keys[name]
        about = self._metadata.state_dict_metadata[key]
        reader = _reader_class()(self._folder, self._metadata)
        try:
            target = torch.empty(about.size, dtype=about.properties.dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no process group is there
                load({key: target}, storage_reader=reader, no_dist=True)
        # torch wraps whatever happens in an exception of its own, which is no `Exception`
        except (Exception, CheckpointException) as error:
            inner = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
            reason = " ".join(str(inner).split())[:160]
            raise CheckpointError(f"{self._folder}: {name}: cannot be read: {reason}") from error
        return target

    def read_array(self, name: str) -> Array:
        return as_array(self.read(name))


@cache
def _reader_class() -> Any:
    """torch's reader, but for how metadata come about. Made late, as torch is slow to import."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def __init__(self, folder: Path, metadata: Any) -> None:
            super().__init__(folder)
            self._ours = metadata

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return self._ours

    return Reader


def open_folder(folder: Path, state_key: str | None = None) -> Header:
    try:
        return _open(folder, state_key)
    except (AttributeError, KeyError, TypeError) as error:  # metadata of another making
        raise _not_metadata(folder) from error


def _not_metadata(folder: Path) -> CheckpointError:
    path = folder / METADATA
    return CheckpointError(f"{path}: is not the metadata of a distributed checkpoint")


def _open(folder: Path, state_key: str | None) -> Header:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _read_metadata(folder)
    files = _check_files(folder, metadata)
    entries = metadata.state_dict_metadata
    ways = {key: _way(metadata, key) for key in entries}
    tensors = {key for key, about in entries.items() if isinstance(about, TensorStorageMetadata)}
    prefix = _prefix(folder, {key: ways[key] for key in tensors}, state_key)
    keys = {}
    for key in tensors:
        way = ways[key]
        if way[: len(prefix)] == prefix and (prefix or len(way) == 1):
            keys[".".join(way[len(prefix) :])] = key
    infos = {
        name: TensorInfo(word_of(entries[key].properties.dtype), tuple(entries[key].size))
        for name, key in sorted(keys.items())
    }
    step = next((n for w in STEP_KEYS if (n := _number(folder, metadata, w)) is not None), None)
    return Header(infos, files, partial(_Stored, folder, keys), step=step)


def files_in(folder: Path) -> tuple[Path, ...]:
    try:
        return _check_files(folder, _read_metadata(folder))
    except (AttributeError, KeyError, TypeError) as error:
        raise _not_metadata(folder) from error


def _read_metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    path = folder / METADATA
    try:
        metadata = _Restricted(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        if "." not in str(error) or " " in str(error):  # pickle's own words for a torn file
            raise Unfinished(f"{path}: not a whole file ({error}); save it again") from error
        raise CheckpointError(
            f"{path}: needs {error} to be loaded, which could run code; refused, nothing of it was "
            "run; save its weights as safetensors where you trust it"
        ) from None
    except Exception as error:  # a torn pickle fails in many ways
        raise Unfinished(f"{path}: not a whole file ({error}); save it again") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise _not_metadata(folder)
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _check_files(folder: Path, metadata: Any) -> tuple[Path, ...]:
    """Every file that the metadata name is in the folder, and long enough."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name = str(place.relative_path)
        if name != Path(name).name or not name.strip(".") or "\\" in name:
            raise CheckpointError(
                f"{folder / METADATA}: names {name!r}, which is not a file in its folder; refused"
            )
        ends[name] = max(ends.get(name, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if file.resolve().parent != folder.resolve():
            raise CheckpointError(f"{file}: is a link out of its folder; put the file itself there")
        if not file.is_file():
            raise Unfinished(f"{file}: is missing, but {METADATA} names it")
        if (size := file.stat().st_size) < end:
            raise Unfinished(f"{file}: is cut short: {size} bytes of {end}; save it again")
    return (folder / METADATA, *(folder / name for name in sorted(ends)))


def _way(metadata: Any, key: str) -> tuple[str, ...]:
    """The keys that led to an entry when it was saved: ("model", "0.weight")."""
    return tuple(map(str, (metadata.planner_data or {}).get(key, (key,))))


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


def _number(folder: Path, metadata: Any, key: str) -> int | None:
    """A plain whole number that was saved along, such as the step."""
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    place = metadata.storage_data.get(MetadataIndex(key))
    about = metadata.state_dict_metadata.get(key)
    if place is None or not isinstance(about, BytesStorageMetadata):
        return None
    with (folder / str(place.relative_path)).open("rb") as file:
        file.seek(place.offset)
        data = io.BytesIO(file.read(place.length))
    try:
        value = torch.load(data, map_location="cpu", weights_only=True)
    except Exception:
        return None  # the folder's name will have it
    return value if isinstance(value, int) and not isinstance(value, bool) else None
