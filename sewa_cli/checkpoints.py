"""The library: finds checkpoints, orders them, checks their headers, reads tensors one by one.

Opening a checkpoint reads its header only. Tensor data stays on disk, memory-mapped, until a
tensor is asked for.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from sewa_cli.dtypes import WORDS, Array
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.mapped import map_file

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
WRITTEN_BY = "sewa_version"  # metadata key of our own outputs
FLOAT_WORDS = {"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"}
INTEGER_WORDS = {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
# wrappers that put a word before every name: DistributedDataParallel, torch.compile, many trainers
PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # safetensors' word: F32, BF16, I64 …
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_WORDS

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass
class Reads:
    """Bytes of tensor data read so far, over all checkpoints that share it."""

    bytes: int = 0


@dataclass
class Checkpoint:
    path: Path
    step: int | None
    size: int  # bytes of the file
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    reads: Reads = field(repr=False)
    _handle: Any = field(default=None, repr=False)
    _arrays: dict[str, Array] | None = field(default=None, repr=False)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. The mapping stays open until `close`, for the next one."""
        try:
            if self._handle is None:
                self._handle = safe_open(self.path, framework="pt")
            tensor: Tensor = self._handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: {name}: cannot be read: {error}") from error
        self.reads.bytes += tensor.numel() * tensor.element_size()
        return tensor

    def read_array(self, name: str) -> Array:
        """One tensor as a read-only view of the mapped file, without torch."""
        if self._arrays is None:
            self._arrays = map_file(self.path)
        array, info = self._arrays.get(name), self.tensors[name]
        if array is None or (WORDS[array.dtype.name], array.shape) != (info.dtype, info.shape):
            raise CheckpointError(f"{self.path}: {name}: has changed since the file was opened")
        self.reads.bytes += array.nbytes
        return array

    def close(self) -> None:
        self._handle = self._arrays = None


def find(given: Sequence[Path], keep_ours: bool = False) -> list[Path]:
    """Files from what the user named: folders, files, or `-` for paths on standard input.

    Averages that we wrote into a folder are not among its checkpoints, unless `keep_ours`.
    """
    paths: list[Path] = []
    for path in given:
        if str(path) == "-":
            lines = (line.strip() for line in sys.stdin)
            paths += [Path(line) for line in lines if line]
            if not paths:
                raise CheckpointError("-: no paths arrived on standard input")
        elif path.is_dir():
            inside = sorted(path.glob("*" + SUFFIX))
            if not inside:
                raise CheckpointError(f"{path}: holds no *{SUFFIX} files")
            paths += [file for file in inside if keep_ours or not _is_ours(file)]
        else:
            paths.append(path)
    repeated = [path for path, n in Counter(path.resolve() for path in paths).items() if n > 1]
    if repeated:
        raise CheckpointError(f"{repeated[0]}: is named twice; name each checkpoint once")
    return paths


def _is_ours(path: Path) -> bool:
    """An averaged file that an earlier run left among the checkpoints is not one of them."""
    try:
        with safe_open(path, framework="numpy") as file:
            return WRITTEN_BY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False  # `open_checkpoint` will tell what is wrong with it


def open_checkpoint(path: Path, reads: Reads) -> Checkpoint:
    """Read the header of one file."""
    try:
        str(path).encode()  # a report could not name it
        if path.is_dir():
            raise CheckpointError(f"{path}: is a folder; name the files in it, or it alone")
        size = path.stat().st_size
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                name: TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except UnicodeEncodeError:
        raise CheckpointError(f"{str(path)!r}: is not a UTF-8 name; rename it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or 'no such file'}") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({reason}); remove it or save it again"
        ) from error
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    for name, info in tensors.items():
        if (
            info.dtype not in FLOAT_WORDS | INTEGER_WORDS
        ):  # complex, or several values packed in a byte
            raise CheckpointError(f"{path}: {name}: {info.dtype} tensors cannot be averaged")
    return Checkpoint(path, _step(path, metadata), size, tensors, metadata, reads)


def _step(path: Path, metadata: Mapping[str, str]) -> int | None:
    """`step` in the metadata, else the last number in the file's name."""
    if "step" in metadata:
        try:
            return int(metadata["step"])
        except ValueError:
            raise CheckpointError(
                f"{path}: metadata step: expected a whole number, found {metadata['step']!r}"
            ) from None
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else None


def in_order(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """By step. Files without any step keep the order they came in, if none of them has one."""
    stepless = [c for c in checkpoints if c.step is None]
    if len(stepless) == len(checkpoints):
        return list(checkpoints)
    if stepless:
        raise CheckpointError(
            f"{stepless[0].path}: no step in its metadata or its name, so it cannot be ordered "
            "among the others; rename it or leave it out"
        )
    ordered = sorted(checkpoints, key=lambda c: (c.step or 0, str(c.path)))
    for before, after in pairwise(ordered):
        if before.step == after.step:
            raise CheckpointError(
                f"{after.path}: has step {after.step}, and so has {before.path}; leave one out"
            )
    return ordered


def narrow(
    checkpoints: Sequence[Checkpoint],
    last: int | None = None,
    every: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Checkpoint]:
    """The step range first, then every n-th counted back from the newest, then the last so many."""
    if (from_step is not None or to_step is not None) and checkpoints[0].step is None:
        raise ConfigError("--from-step and --to-step: these checkpoints have no steps")
    kept = [
        c
        for c in checkpoints
        if (from_step is None or (c.step is not None and c.step >= from_step))
        and (to_step is None or (c.step is not None and c.step <= to_step))
    ]
    if not kept:
        asked = f"{'' if from_step is None else from_step}..{'' if to_step is None else to_step}"
        first, newest = checkpoints[0].step, checkpoints[-1].step
        there = f"the steps are {first}..{newest}"
        raise ConfigError(f"--from-step, --to-step: no checkpoint lies in {asked}; {there}")
    if every is not None:
        kept = kept[::-1][::every][::-1]
    return kept[-last:] if last is not None else kept


def check_agreement(checkpoints: Sequence[Checkpoint]) -> None:
    """Names, shapes and dtypes must be those that most of the checkpoints have."""
    usual, _ = Counter(frozenset(c.tensors.items()) for c in checkpoints).most_common(1)[0]
    expected = dict(usual)
    for checkpoint in checkpoints:
        found = checkpoint.tensors
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise CheckpointError(
                    f"{checkpoint.path}: {name}: expected {expected.get(name, 'no such tensor')} "
                    f"as in the other checkpoints, found {found.get(name, 'no such tensor')}"
                )


def match_names(
    checkpoint: Checkpoint,
    tied: Sequence[tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    floats: Iterable[str],
) -> dict[str, str]:
    """Model name → checkpoint name, for every tensor of the model, tied ones once.

    `tied`: the model's names, those of one tensor together; `shapes`: of the model's tensors.
    Of tied names, the one that the checkpoint has is kept, so the averaged file looks like it.
    """
    sources, extra = _sources(checkpoint, tied)
    missing = [names[0] for names in tied if not any(name in sources for name in names)]
    if missing or extra:
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model that build_model() returns: "
            f"{_first_few('missing from the checkpoint', missing)}; "
            f"{_first_few('not in the model', extra)}"
        )
    kept = {next(name for name in names if name in sources): names[0] for names in tied}
    float_names = set(floats)
    for name, first in kept.items():
        info = checkpoint.tensors[sources[name]]
        kind = "a floating-point" if first in float_names else "an integer"
        if info.shape != tuple(shapes[first]) or info.is_float != (first in float_names):
            raise CheckpointError(
                f"{checkpoint.path}: {sources[name]}: expected {kind} tensor of shape "
                f"{list(shapes[first])} as in the model, found {info}"
            )
    return {name: sources[name] for name in kept}


def _sources(
    checkpoint: Checkpoint, tied: Sequence[tuple[str, ...]]
) -> tuple[dict[str, str], list[str]]:
    """Model name → the checkpoint's name for it; and what of the checkpoint is left over."""
    by_variant: dict[str, str] = {}
    stripped = [(name, list(_variants(name))) for names in tied for name in names]
    for depth in range(max(len(variants) for _, variants in stripped)):
        for name, variants in stripped:  # a name as it is beats one without a prefix, and so on
            if depth < len(variants):
                by_variant.setdefault(variants[depth], name)
    sources: dict[str, str] = {}
    extra: list[str] = []
    for found in checkpoint.tensors:
        target = next((by_variant[v] for v in _variants(found) if v in by_variant), None)
        if target is None or target in sources:
            extra.append(found)
        else:
            sources[target] = found
    return sources, extra


def check_tied(checkpoint: Checkpoint, tied: Sequence[tuple[str, ...]]) -> None:
    """Several names of one tensor of the model must hold the same bytes: only one is averaged."""
    sources, _ = _sources(checkpoint, tied)
    for names in tied:
        present = [sources[name] for name in names if name in sources]
        for other in present[1:]:
            one, two = checkpoint.read(present[0]), checkpoint.read(other)
            alike = one.dtype == two.dtype and one.shape == two.shape
            if not (alike and bool((_raw(one) == _raw(two)).all())):
                raise CheckpointError(
                    f"{checkpoint.path}: {present[0]} and {other} are one tensor in the model, "
                    "but differ in the file"
                )


def _raw(tensor: Tensor) -> Any:
    """Its bytes, so that a NaN equals itself: NaN is told of later."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _variants(name: str) -> Iterator[str]:
    """The name, then the name without one, two … leading wrapper prefixes."""
    yield name
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
        yield name
    if "._orig_mod." in name:  # a compiled part of a model
        yield name.replace("._orig_mod.", ".")


def _first_few(title: str, names: Sequence[str], few: int = 3) -> str:
    shown = ", ".join(islice(names, few)) or "nothing"
    return f"{title}: {shown}" + (f" and {len(names) - few} more" if len(names) > few else "")
