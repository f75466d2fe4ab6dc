"""Packing: files appear whole under their final name, or not at all.

The safetensors writer is our own because the library's wants every tensor in memory at once; this
one asks for them piece by piece, in the order they stand in the file, and needs no seeking, so it
can write to a pipe as well. The format: an 8-byte length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from sewa_cli.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    from sewa_cli.dtypes import Array

_ALIGNMENT = 8
_SUFFIX = ".safetensors"


class Staged:
    """A file written beside its final place; `seal` ends the writing, `publish` puts it there."""

    def __init__(self, path: Path, force: bool) -> None:
        self.path = path
        self._force = force
        self._published = False
        token = secrets.token_hex(4)
        self._temporary = path.with_name(f".{path.name}.{token}.tmp")
        self._older = path.with_name(f".{path.name}.{token}.old")
        self.file: IO[bytes] = open(self._temporary, "xb")  # noqa: SIM115

    def seal(self) -> None:
        """All bytes are on the disk: what can fail for want of space has not failed."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def publish(self) -> None:
        if self._force:
            with suppress(OSError):  # there is none, or the file system has no hard links
                os.link(self.path, self._older)
            os.replace(self._temporary, self.path)
        else:
            self._link()
        self._published = True
        sync_folder(self.path.parent)

    def retract(self) -> None:
        """Take back what was published; what --force has replaced stands there again."""
        if self._published:
            with suppress(OSError):
                if self._older.exists():
                    os.replace(self._older, self.path)
                elif not self._force:  # else the older file may be gone already
                    os.unlink(self.path)

    def _link(self) -> None:
        """Unlike a rename, a link fails if someone else made the file since we looked."""
        try:
            os.link(self._temporary, self.path)
            os.unlink(self._temporary)
        except FileExistsError:
            raise OutputError(f"{self.path}: appeared while we worked; use --force") from None
        except OSError:  # a file system without hard links
            check_free(self.path, force=False)
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Clear away what is left beside the final place; once published, only the older file."""
        with suppress(OSError):  # closing flushes, and on a full disk fails again
            self.file.close()
        for path in (self._temporary, self._older):
            with suppress(OSError):
                os.unlink(path)


@contextmanager
def staged(path: Path, force: bool = False) -> Iterator[Staged]:
    """A `Staged` that is discarded, whatever happens, unless it was published."""
    with told_as_output_error(path):
        stage = Staged(path, force)
        try:
            yield stage
        finally:
            stage.discard()


class Stage(Protocol):
    """A file or a folder beside its final place."""

    @property
    def path(self) -> Path: ...

    def seal(self) -> None: ...

    def publish(self) -> None: ...

    def retract(self) -> None: ...


def publish_together(stages: Sequence[Stage]) -> None:
    """All of them appear, or none: each is sealed before the first gets its name."""
    for stage in stages:
        with told_as_output_error(stage.path):
            stage.seal()
    try:
        for stage in stages:
            with told_as_output_error(stage.path):
                stage.publish()
    except BaseException:
        for stage in stages:
            stage.retract()
        raise


@contextmanager
def told_as_output_error(path: Path | str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path}: cannot be written: {reason}; nothing was changed") from error


def check_free(path: Path, force: bool) -> None:
    """Refuse, before any work is done, what could not be written in the end."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{str(path)!r}: is not a UTF-8 name; choose another") from None
    with told_as_output_error(path):
        _check_free(path, force)


def _check_free(path: Path, force: bool) -> None:
    folder = path.parent
    if not path.name or path.is_dir():
        raise OutputError(f"{path}: is a folder; name a file")
    # --force would put a file in the place of a device, a pipe or what /dev/stdout is a link to
    if is_for_devices(folder) or (path.exists() and not path.is_file()):
        raise OutputError(
            f"{path}: is not a regular file; name one, or use -o - for standard output"
        )
    if path.is_symlink() and not path.exists():
        raise OutputError(f"{path}: is a link to nowhere; choose another name")
    if path.exists() and not force:
        raise OutputError(f"{path}: exists; use --force to overwrite it, or another name")
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder; make it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder}: is not writable; choose another with --output")


def is_for_devices(folder: Path) -> bool:
    """Whether what stands in it is the system's; /dev/shm is for anybody's files."""
    place = folder.resolve()
    return place in (Path("/dev"), Path("/dev/fd")) or Path("/proc") in (place, *place.parents)


def first_free(path: Path, others: Callable[[Path], Sequence[Path]]) -> Path:
    """`path`, or path-2, path-3 … of which neither it nor its `others` exist."""
    candidate, n = path, 1
    while any(p.exists() for p in (candidate, *others(candidate))):
        n += 1
        candidate = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return candidate


def write_safetensors(
    file: IO[bytes],
    entries: Mapping[str, tuple[str, tuple[int, ...], int]],
    pieces: Callable[[Sequence[str]], Generator[tuple[str, Array], None, None]],
    metadata: Mapping[str, str],
) -> None:
    """Stream a safetensors file. entries: name → (dtype word, shape, bytes).

    pieces: given the names in the order of the file, gives each tensor's data in one or more parts.
    Wider dtypes first, then by name, as the library orders them: every tensor is then aligned.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    order = sorted(entries, key=lambda name: (-_width(entries[name]), name))
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


def _width(entry: tuple[str, tuple[int, ...], int]) -> int:
    """Bytes of one element, from the digits of the dtype word (BOOL: 1)."""
    digits = "".join(c for c in entry[0].split("_")[0] if c.isdigit())
    return int(digits) // 8 if digits else 1


def _bytes(array: Array) -> memoryview:
    import numpy as np

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
    return output.with_name(f"{_stem(output)}-{number:05d}-of-{of:05d}{_SUFFIX}")


def index_path(output: Path) -> Path:
    return output.with_name(f"{_stem(output)}{_SUFFIX}.index.json")


def belongs_to_set(path: Path, output: Path) -> bool:
    """Whether it has a name that a file of a set called `output` has, whatever their number."""
    shard = rf"{re.escape(_stem(output))}-\d{{5,}}-of-\d{{5,}}{re.escape(_SUFFIX)}"
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
    return output.name.removesuffix(_SUFFIX)


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


def sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
