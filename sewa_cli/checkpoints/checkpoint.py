"""One checkpoint, whatever wrote it: the header is read at once, tensors when they are asked for.

Each format has a module that turns its files into a `Header`; the rest of the program knows only
`Checkpoint`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from json import JSONDecodeError
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sewa_cli.checkpoints.state import Why
from sewa_cli.dtypes import DTYPES, WORDS, Array, as_array, torch_dtype
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, check_regular, parse_json, read_bytes, real
from sewa_cli.mirrors import mirror_of, named

if TYPE_CHECKING:
    from torch import Tensor

MEAN_STEPS: Final = "sewa_mean_steps"  # metadata key: the number of steps a mean is of
WRITTEN_BY: Final = "sewa_version"  # metadata key of averages
REPORT: Final = "sewa.report.json"  # inside an average that is a folder
FLOATS: Final = {"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"}

MOST_JSON: Final = 64 * MIB  # of an index, or of all that a trainer has logged
MOST_TENSORS: Final = 200_000  # in a checkpoint; ten times what the largest models have
# what a checkpoint is to its trainer, and so what an average of such checkpoints should be
Kind = Literal["file", "set", "folder", "adapter", "torch", "distributed"]


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # safetensors' word: F32, BF16, I64 …
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Stamp(NamedTuple):
    """The size and time of a file, which change when somebody writes to it or replaces it.

    Not the inode: some mounts give the same file a new one, and hours of work would be refused.
    """

    size: int
    modified: int  # ns


def stamp_of(file: Path, fresh: bool = False) -> Stamp:
    """Return a file's stamp; `fresh`: a remote file's is asked for again."""
    if (mirror := mirror_of(file)) and (stamp := mirror.stamp(file, fresh)):
        return Stamp(*stamp)
    with reading(file):
        about = check_regular(file)
    return Stamp(about.st_size, about.st_mtime_ns)


class Reader(ABC):
    """Open files; they are closed when the reader is garbage-collected."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, as a view of the mapped file where the format allows it."""

    def read_array(self, name: str) -> Array:
        """Return the same for NumPy; where the format needs no torch, without torch."""
        return as_array(self.read(name))

    def begin(self, name: str, part: slice) -> None:
        """Begin to fetch a part of a tensor that will be read soon, where it has to be fetched."""
        del name, part

    def runs(self, name: str, part: slice | None) -> list[tuple[int, Tensor]] | None:
        """See `Checkpoint.runs`, for tensors that are read whole but whose parts can be mapped."""
        del name, part
        return None


@dataclass(kw_only=True)
class Header:
    """The facts that a format's module knows about its files before any tensor is read."""

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]  # that hold or index the weights
    open: Callable[[], Reader]
    metadata: dict[str, str] = field(default_factory=dict)
    averaged: int | None = None  # steps from the start that icefall's model_avg is the mean of
    step: int | None = None  # of a Header, as recorded in the file itself
    mean_steps: int | None = None  # the number of steps that it is the mean of; None: a snapshot
    metrics: dict[str, float] = field(default_factory=dict)  # logged by the trainer at this step
    mapped: bool = True  # a tensor that is read is a view of the file, and takes no memory
    left: dict[str, Why] = field(default_factory=dict)  # keys of tensors that are not weights
    groups: tuple[str, ...] = ()  # the keys of several state dicts, which begin the names


@dataclass
class Reads:
    """Bytes of tensor data read so far, over all checkpoints that share it."""

    bytes: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, count: int) -> None:
        with self._lock:  # several threads read, and += is not atomic
            self.bytes += count


@dataclass(kw_only=True)
class Checkpoint(Header):
    path: Path  # a file, or a folder
    size: int  # bytes of its files
    reads: Reads
    kind: Kind = "file"
    scheme: str | None = None  # of the name, where that is what the step is from
    stamps: dict[Path, Stamp] = field(default_factory=dict)  # of the files, when opened
    window: int | None = None  # bytes to read at a time, where they are fetched and not kept
    _reader: Reader | None = None

    @property
    def name(self) -> str:
        """Return the path or URL by which people know it."""
        return named(self.path)

    @property
    def folder(self) -> Path:
        """Return where files next to the weights are."""
        return self.path if self.path.is_dir() else self.path.parent

    def read(self, name: str, part: slice | None = None) -> Tensor:
        """Return one tensor, on the CPU. The files stay mapped until `close`, for the next one.

        part: return these numbers of the flat tensor only, and read no others where it is mapped.
        """
        if part is None:
            tensor = self._opened().read(name)
        else:
            tensor = self._part(name, part)
        self.reads.add(tensor.numel() * tensor.element_size())
        return tensor

    def _part(self, name: str, part: slice) -> Tensor:
        runs = self.runs(name, part)
        if runs is None:
            whole = self._opened().read(name)
            self.reads.add((whole.numel() - (part.stop - part.start)) * whole.element_size())
            return whole.reshape(-1)[part]
        if len(runs) == 1:
            return runs[0][1]
        import torch

        if not runs:
            return torch.empty(0, dtype=torch_dtype(DTYPES[self.tensors[name].dtype]))
        return torch.cat([view for _, view in runs])

    def runs(self, name: str, part: slice | None = None) -> list[tuple[int, Tensor]] | None:
        """Return flat views of the mapped files, each with its offset in the flat tensor, or part.

        None: the tensor cannot be mapped like that. They are not counted as read.
        """
        found = self._runs(name, part)
        if found is None or part is None:
            return found
        cut = []
        for start, view in found:
            begin, end = max(start, part.start), min(start + view.numel(), part.stop)
            if begin < end:
                cut.append((begin - part.start, view[begin - start : end - start]))
        return cut

    def _runs(self, name: str, part: slice | None) -> list[tuple[int, Tensor]] | None:
        reader, info = self._opened(), self.tensors[name]
        if not self.mapped:
            return reader.runs(name, part)
        tensor = reader.read(name)
        word = WORDS[str(tensor.dtype).removeprefix("torch.")]
        if (word, tuple(tensor.shape)) != (info.dtype, info.shape):
            raise self._changed(name)
        return [(0, tensor.reshape(-1))] if tensor.is_contiguous() else None

    def _changed(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name}: has changed since it was opened; try again")

    def read_array(self, name: str, part: slice | None = None) -> Array:
        """Return a read-only NumPy view, without torch where the format allows it."""
        if part is not None and not self.mapped:
            return as_array(self.read(name, part))
        array, info = self._opened().read_array(name), self.tensors[name]
        if (WORDS[array.dtype.name], array.shape) != (info.dtype, info.shape):
            raise self._changed(name)
        array = array if part is None else array.reshape(-1)[part]
        self.reads.add(array.nbytes)
        return array

    def begin(self, name: str, part: slice) -> None:
        self._opened().begin(name, part)

    def _opened(self) -> Reader:
        if self._reader is None:
            self._reader = self.open()
        return self._reader

    def check_unchanged(self) -> None:
        """Refuse it if a file has changed since: what was read may be a mixture of old and new."""
        for file, stamp in self.stamps.items():
            # a file that the trainer has removed stays readable as it was while it is open
            if file.exists() and stamp_of(file, fresh=True) != stamp:
                raise CheckpointError(
                    f"{file}: changed while it was being read; try again when nothing writes to it"
                )

    def close(self) -> None:
        self._reader = None


def paths_of(checkpoints: Iterable[Checkpoint]) -> list[Path]:
    """Return the paths and all files of checkpoints: what must not be overwritten."""
    return [path for c in checkpoints for path in (c.path, *c.files)]


def plain_numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers: only those can be metrics."""
    numbers = {}
    for name, value in found.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):  # an int of hundreds of digits
                if isfinite(value):
                    numbers[str(name)] = float(value)
    return numbers


# ---- faults that all formats share -----------------------------------------------------------


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    with reading(path):
        text = read_bytes(path, most)
    try:
        content = parse_json(text)
    except (JSONDecodeError, UnicodeDecodeError):
        content = None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise Unfinished(f"{path}: not a complete JSON object; save the checkpoint again")
    return content


def check_count(path: Path, tensors: Collection[str]) -> None:
    """Before anything is done for each of them."""
    if len(tensors) > MOST_TENSORS:
        raise CheckpointError(
            f"{path}: has {len(tensors):,} tensors; sewa reads at most {MOST_TENSORS:,}"
        )


def neighbours(index: Path, names: Collection[Any]) -> list[Path]:
    """The files that an index names, sorted. A name that leads out of its folder is refused."""
    for name in names:
        is_plain = isinstance(name, str) and name == Path(name).name and "\\" not in name
        if not is_plain or not name.strip(".") or not name.isprintable():
            raise CheckpointError(
                f"{index}: names {name!r:.100}, which is not a file in its own folder; "
                "put the shards there"
            )
    files = sorted({index.with_name(name) for name in names})
    with reading(index):  # a name may be longer than the system allows
        for file in files:
            is_link = file.is_symlink() and mirror_of(file) is None
            if is_link and real(file).parent != real(index.parent):
                raise CheckpointError(
                    f"{file}: is a link out of its folder; put the file itself there"
                )
        missing = [file for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Unfinished(
            f"{missing[0]}: is missing{more}, but {index.name} names it; copy it there"
        )
    return files
