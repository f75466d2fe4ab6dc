"""The safetensors files that we write: streamed, alone or in sharded sets; and hashes of files.

The writer is our own because the library's wants every tensor in memory at once; this one asks for
them piece by piece, in the order they stand in the file, and needs no seeking, so it can write to a
pipe as well. The format: an 8-byte length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

import numpy as np

from sewa_cli.checkpoints import SUFFIX
from sewa_cli.checkpoints.safetensors import INDEX
from sewa_cli.dtypes import DTYPES, Array
from sewa_cli.errors import CheckpointError

_ALIGNMENT = 8
Entry = tuple[str, tuple[int, ...], int]  # dtype word, shape, bytes


def write_safetensors(
    file: IO[bytes],
    entries: Mapping[str, Entry],
    pieces: Callable[[Sequence[str]], Generator[tuple[str, Array], None, None]],
    metadata: Mapping[str, str],
) -> None:
    """Stream a safetensors file.

    pieces: given the names in the order of the file, gives each tensor's data in one or more parts.
    Wider dtypes first, then by name, as the library orders them: every tensor is then aligned.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    order = sorted(entries, key=lambda name: (-DTYPES[entries[name][0]].itemsize, name))
    offset = 0
    for name in order:
        dtype, shape, size = entries[name]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    written = dict.fromkeys(order, 0)
    ahead = _Writeback(file)
    with closing(pieces(order)) as stream:
        for name, piece in stream:
            data = _bytes(piece)
            written[name] += len(data)
            file.write(data)
            ahead.wrote(len(data))
    for name in order:
        if written[name] != entries[name][2]:
            raise ValueError(f"{name}: {written[name]} bytes instead of {entries[name][2]}")


class _Writeback:
    """Asks the system to begin writing to the disk while the rest is computed.

    `seal` waits for the disk in the end, and would have to wait for all of it. On Linux, advice
    that pages are not needed begins to write those that are dirty, and keeps them; elsewhere
    nothing happens.
    """

    STRIDE = 2**24

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begun = self._end = 0

    def wrote(self, size: int) -> None:
        self._end += size
        if self._end - self._begun >= self.STRIDE:
            with suppress(OSError, AttributeError, ValueError):  # a pipe, another system
                self._file.flush()
                start, length = self._begun, self._end - self._begun
                os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
            self._begun = self._end


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ---- sharded sets, as the Hugging Face libraries name and split them ---------------------------


def split_into_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names, file by file, in their order; a file is closed when the next tensor would not fit.

    A tensor larger than `limit` has a file for itself, before the one that is being filled.
    """
    shards: list[list[str]] = []
    filling: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if filled + size > limit:
            shards.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += size
    return [*shards, filling] if filling else shards


def shard_path(output: Path, number: int, of: int) -> Path:
    return output.with_name(f"{_stem(output)}-{number:05d}-of-{of:05d}{SUFFIX}")


def index_path(output: Path) -> Path:
    return output.with_name(f"{_stem(output)}{SUFFIX}{INDEX}")


def belongs_to_set(path: Path, output: Path) -> bool:
    """Whether it has a name that a file of a set called `output` has, whatever their number."""
    shard = rf"{re.escape(_stem(output))}-\d{{5,}}-of-\d{{5,}}{re.escape(SUFFIX)}"
    named = path.name == index_path(output).name or re.fullmatch(shard, path.name)
    return bool(named) and path.parent.resolve() == output.parent.resolve()


def index_of(output: Path, shards: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """The index: which file holds which tensor, and the bytes of all tensors."""
    of = len(shards)
    files = {
        name: shard_path(output, number, of).name
        for number, names in enumerate(shards, 1)
        for name in names
    }
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
    return (json.dumps(index, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()


def _stem(output: Path) -> str:
    return output.name.removesuffix(SUFFIX)


def sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def sha256_of(files: Sequence[Path], owner: Path) -> str:
    """Of one file, its own; of several, that of what `sha256sum` lists for them, sorted by name.

    Names are relative to `owner`, a folder or an index: a run that was moved keeps its hashes.
    """
    if len(files) == 1:
        return sha256(files[0])
    folder = owner if owner.is_dir() else owner.parent
    listed = {file.relative_to(folder).as_posix(): sha256(file) for file in files}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(listed.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
