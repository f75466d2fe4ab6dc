"""The safetensors files that we write: streamed, whole or in shards; and hashes of files.

The writer is our own because the library's wants every tensor in memory at once; this one asks for
them piece by piece, in the order they stand in the file, and needs no seeking, so it can write to a
pipe as well. The format: an 8-byte length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from io import BufferedReader
from pathlib import Path, PurePath
from typing import IO, cast

import numpy as np

from sewa_cli.dtypes import DTYPES, RESERVED, Array
from sewa_cli.errors import CheckpointError, OutputError
from sewa_cli.files import open_regular
from sewa_cli.mirrors import mirror_of
from sewa_cli.output.mean import thread_count
from sewa_cli.report.recipe import OutputFile
from sewa_cli.text import size as size_of

_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # bytes that the library reads
_STRIDE = 2**24  # bytes that go to the disk at a time
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
    header: dict[str, object] = {RESERVED: dict(sorted(metadata.items()))}
    order = sorted(entries, key=lambda name: (-DTYPES[entries[name][0]].itemsize, name))
    offset = 0
    for name in order:
        dtype, shape, size = entries[name]
        offsets = [offset, offset + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise OutputError(
            f"the names of {len(entries)} tensors take {size_of(len(text))}, and safetensors loads "
            f"{size_of(_LONGEST_HEADER)}; split the output with --shard-size"
        )
    file.write(struct.pack("<Q", len(text)) + text)
    written = dict.fromkeys(order, 0)
    begun = end = 0
    with closing(pieces(order)) as stream:
        for name, piece in stream:
            data = _bytes(piece)
            written[name] += len(data)
            file.write(data)
            end += len(data)
            if end - begun >= _STRIDE:
                _begin_writing_back(file, begun, end)
                begun = end
    for name in order:
        if written[name] != entries[name][2]:
            raise ValueError(f"{name}: {written[name]} bytes instead of {entries[name][2]}")


def _begin_writing_back(file: IO[bytes], start: int, end: int) -> None:
    """Ask the system to begin writing to the disk while the rest is computed.

    `sync` waits for the disk in the end, and would have to wait for all of it. On Linux, advice
    that pages are not needed begins to write those that are dirty, and keeps them; elsewhere
    nothing happens.
    """
    with suppress(OSError, AttributeError, ValueError):  # a pipe, another system
        file.flush()
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def split_into_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split names over files as the Hugging Face libraries do, in their order.

    A file ends when the next tensor would not fit.

    A tensor larger than `limit` has a file for itself, before the file that is being filled.
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


def sha256_of(files: Sequence[Path], owner: Path) -> str:
    """Return a file's hash; of several files, that of what `sha256sum` lists, sorted by name.

    Names are relative to `owner`, a folder or an index: a run that was moved keeps its hashes.
    """
    if len(files) == 1:
        return _sha256(files[0])
    folder = owner if owner.is_dir() else owner.parent
    listed = {file.relative_to(folder).as_posix(): _sha256(file) for file in files}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(listed.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: Path) -> str:
    if (mirror := mirror_of(path)) is not None and not mirror.is_whole(path):
        content = hashlib.sha256()
        for block in mirror.blocks(path):
            content.update(block)
        return content.hexdigest()
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def hashes_of(made: Path, output: str) -> list[OutputFile]:
    """Hash the files of an output; their paths begin with the name that it will have."""
    name = Path(output).name
    inside = (path for path in made.rglob("*") if path.is_file())
    paths = sorted(inside) if made.is_dir() else [made]
    with ThreadPoolExecutor(thread_count()) as pool:
        hashes = list(pool.map(lambda path: sha256_of([path], path), paths))
    return [
        OutputFile(
            path=str(PurePath(name, path.relative_to(made))),
            size=path.stat().st_size,
            sha256=digest,
        )
        for path, digest in zip(paths, hashes, strict=True)
    ]
