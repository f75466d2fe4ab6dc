"""One checkpoint, whatever wrote it: a header read at once, tensors read when they are asked for.

Each format has a module that makes a `Header` of its files; all the rest of the program knows only
`Checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from sewa_cli.dtypes import WORDS, Array
from sewa_cli.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

WRITTEN_BY: Final = "sewa_version"  # metadata key of our own outputs
FLOAT_WORDS: Final = {"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"}
INTEGER_WORDS: Final = {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}

# what a checkpoint is to its trainer, and so what an average of such checkpoints should be
Kind = Literal["file", "set", "folder", "adapter", "torch", "distributed"]


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # safetensors' word: F32, BF16, I64 …
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_WORDS

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Stamp(NamedTuple):
    """What differs once somebody has written to a file, or put another in its place.

    Not the inode: some mounts give the same file another one, and hours of work would be refused.
    """

    size: int
    modified: int  # ns


def stamp_of(file: Path) -> Stamp:
    try:
        about = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error
    return Stamp(about.st_size, about.st_mtime_ns)


class Reader(Protocol):
    """Files that are open; they are closed when it is let go."""

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, as a view of the mapped file where the format allows it."""

    def read_array(self, name: str) -> Array:
        """The same for NumPy; where the format needs no torch, without torch."""


@dataclass(frozen=True)
class Header:
    """What a format's module tells of its files, no tensor read."""

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]  # that hold or index the weights
    open: Callable[[Path], Reader]  # given the folder that relative paths start from
    metadata: dict[str, str] = field(default_factory=dict)
    step: int | None = None  # what the file itself says
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Reads:
    """Bytes of tensor data read so far, over all checkpoints that share it."""

    bytes: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, count: int) -> None:
        with self._lock:  # averages are read by several threads, and += is not one step
            self.bytes += count


@dataclass
class Checkpoint:
    path: Path  # a file, or a folder
    step: int | None
    size: int  # bytes of its files
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    reads: Reads = field(repr=False)
    kind: Kind = "file"
    files: tuple[Path, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)  # that the trainer logged at this step
    stamps: dict[Path, Stamp] = field(default_factory=dict, repr=False)  # of files, when opened
    _open: Callable[[Path], Reader] | None = field(default=None, repr=False)
    # where we were: a thread may open files while the user's code is in another folder
    _base: Path = field(default=Path(), repr=False)
    _reader: Reader | None = field(default=None, repr=False)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. The files stay mapped until `close`, for the next one."""
        tensor = self._opened().read(name)
        self.reads.add(tensor.numel() * tensor.element_size())
        return tensor

    def read_array(self, name: str) -> Array:
        """The same as a read-only NumPy view, without torch where the format allows it."""
        array, info = self._opened().read_array(name), self.tensors[name]
        if (WORDS[array.dtype.name], array.shape) != (info.dtype, info.shape):
            raise CheckpointError(f"{self.path}: {name}: has changed since it was opened")
        self.reads.add(array.nbytes)
        return array

    def _opened(self) -> Reader:
        if self._reader is None:
            assert self._open is not None
            self._reader = self._open(self._base)
        return self._reader

    def check_unchanged(self) -> None:
        """Refuse it if a file is not what it was at first: what was read may be old and new."""
        for file, stamp in self.stamps.items():
            # one that a trainer has removed was read as it was: what is open stays
            now = self._base / file
            if now.exists() and stamp_of(now) != stamp:
                raise CheckpointError(
                    f"{file}: has changed while it was read; run it again when nobody writes to it"
                )

    def close(self) -> None:
        self._reader = None


def number_in(path: Path) -> int | None:
    """The last number in a file's or folder's name."""
    # a folder called v1.5-step-900 has no suffix to take off
    numbers = re.findall(r"\d+", path.name if path.is_dir() else path.stem)
    return int(numbers[-1]) if numbers else None


def plain_numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers, which is what a metric is."""
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    }
