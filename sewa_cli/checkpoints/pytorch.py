"""PyTorch's own files: .pt, .pth, .bin and Lightning's .ckpt, and archives that hold one.

They are pickles, and a pickle can run any code. Only `torch.load(weights_only=True)` ever touches
them: harmless classes become inert stand-ins, and whatever else is asked for is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any

from sewa_cli.checkpoints import archives, toolkits
from sewa_cli.checkpoints.checkpoint import Header, Reader, TensorInfo, plain_numbers, reading
from sewa_cli.checkpoints.inert import Inert, harmless
from sewa_cli.checkpoints.safetensors import check_holds, read_index, shards_of
from sewa_cli.checkpoints.state import State, find_weights
from sewa_cli.dtypes import WORDS
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, open_regular
from sewa_cli.mirrors import bring
from sewa_cli.text import one_line, shown

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", *archives.WEIGHTS)
STEP_KEYS = ("global_step", "step")
MEAN = "model_avg"  # icefall's key of the mean of the weights since the start
REFUSED = "refused, none of it was run; where you trust it, save its weights as safetensors"
_MOST_PICKLED = 64 * MIB  # of a file's pickle; its tensors' bytes are not in it
_MOST_MEMBERS = 16 * MIB  # of the list of an archive's members, of which each tensor is one
_lock = Lock()  # torch has one list of the classes that it finds in a pickle


class _Loaded(Reader):
    """Loads each file, memory-mapped, when its first tensor is read."""

    def __init__(self, places: Mapping[str, Path], state_key: str | None) -> None:
        self._places = places
        self._state_key = state_key
        self._states: dict[Path, dict[str, Tensor]] = {}

    def read(self, name: str) -> Tensor:
        path = self._places[name]
        if path not in self._states:
            state = find_state(path, load(path), self._state_key)
            self._states[path] = state.tensors
        if name not in self._states[path]:
            raise CheckpointError(f"{path}: {name}: has changed since it was opened; try again")
        return self._states[path][name].detach()


class RunningMeans(Reader):
    """The mean over the steps between two of icefall's files, each with the mean since step 0."""

    def __init__(self, names: Collection[str], after: tuple[Path, int], *before: tuple[Path, int]):
        self._weights = _Loaded(dict.fromkeys(names, after[0]), None)
        self._means = [(_Loaded(dict.fromkeys(names, p), MEAN), n) for p, n in (after, *before)]

    def read(self, name: str) -> Tensor:
        weights = self._weights.read(name)
        if not weights.is_floating_point():
            return weights
        sums = [n * reader.read(name).double() for reader, n in self._means]
        counts = [n for _, n in self._means]
        if len(sums) == 1:
            return (sums[0] / counts[0]).to(weights.dtype)
        return ((sums[0] - sums[1]) / (counts[0] - counts[1])).to(weights.dtype)


def _averaged(content: Mapping[Any, Any], tensors: Mapping[str, Tensor]) -> int | None:
    """Return the step up to which `model_avg` has the mean of the weights, if icefall wrote it."""
    step, period = content.get("batch_idx_train"), content.get("average_period", 1)
    mean = content.get(MEAN)
    if type(step) is not int or type(period) is not int or period < 1 or not isinstance(mean, dict):
        return None
    floats = {name: one for name, one in tensors.items() if one.is_floating_point()}
    fits = all(is_tensor(mean.get(n)) and mean[n].shape == one.shape for n, one in floats.items())
    return step - step % period or None if fits else None


def open_file(path: Path, state_key: str | None = None) -> Header:
    content = load(path)
    state = find_state(path, content, state_key)
    tensors = {name: _info(path, name, tensor) for name, tensor in state.tensors.items()}
    averaged = _averaged(content, state.tensors) if state_key is None else None
    left = state.left_keys()
    if averaged is not None:
        left.pop(MEAN, None)
    return Header(
        averaged=averaged,
        tensors=tensors,
        files=(path,),
        open=partial(_Loaded, dict.fromkeys(tensors, path), state_key),
        step=_step(content),
        metrics=_metrics(content),
        mapped=_is_mapped(path),
        left=left,
        groups=state.groups,
    )


def _step(content: Mapping[Any, Any]) -> int | None:
    found = [content.get(word) for word in STEP_KEYS] + [toolkits.step_of(content)]
    return next((number for number in found if type(number) is int), None)


def open_set(index: Path, state_key: str | None = None) -> Header:
    """pytorch_model.bin.index.json and its shards."""
    places = read_index(index)
    tensors: dict[str, TensorInfo] = {}
    for shard, names in shards_of(places).items():
        state = find_state(shard, load(shard), state_key).tensors
        check_holds(shard, names, state)
        tensors |= {name: _info(shard, name, state[name]) for name in sorted(names)}
    shards = tuple(shards_of(places))
    return Header(
        tensors=tensors,
        files=(index, *shards),
        open=partial(_Loaded, places, state_key),
        mapped=all(map(_is_mapped, shards)),
    )


def _is_mapped(path: Path) -> bool:
    """Files from before PyTorch 1.6, and those inside an archive, cannot be mapped."""
    with reading(path), open_regular(path) as file:
        return path.suffix not in archives.WEIGHTS and _is_archive(file)


def load(path: Path) -> Any:
    """Return what the file holds, its tensors mapped, not read; nothing in it is executed."""
    bring(path)
    try:
        return load_plain(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_reason(error)}; {REFUSED}") from None
    except zipfile.BadZipFile as error:
        raise Unfinished(
            f"{path}: not a complete PyTorch file; remove it or save it again"
        ) from error
    except Exception as error:  # a torn file fails in many ways
        reason = "no pickle" if isinstance(error, KeyError) else one_line(error, 160)
        raise Unfinished(f"{path}: cannot be read by PyTorch ({reason}); save it again") from error


# ---- unpickling ------------------------------------------------------------------------------


def load_plain(source: Path | IO[bytes]) -> Any:
    """Unpickle by torch, here alone; raises whatever it does. Archives on the disk are mapped."""
    import torch

    if isinstance(source, Path) and source.suffix in archives.WEIGHTS:
        with archives.opened(source) as member:
            return load_plain(member)
    if isinstance(source, Path):
        with open_regular(source) as file:
            is_mapped = _check_archive(file)
    else:
        is_mapped = False
        _check_archive(source)
        source.seek(0)
    with warnings.catch_warnings(), _lock, torch.serialization.safe_globals([*harmless()]):
        warnings.simplefilter("ignore")  # about the pickle's version
        return _bare(torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped))


def mentions(path: Path, word: str) -> bool:
    """Whether the file's pickle has this word in it; it is not unpickled."""
    try:
        with archives.opened(path) as file:
            if not _check_archive(file):
                return False
            with zipfile.ZipFile(file) as archive:
                pickled = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                return word.encode() in archive.read(pickled)
    except Exception:  # a torn file fails in many ways; opening it will say what is wrong
        return False


def _is_archive(file: IO[bytes]) -> bool:
    return file.read(4) == b"PK\x03\x04"


def _check_archive(file: IO[bytes]) -> bool:
    """Refuse what is compressed, perhaps a bomb, and lists or pickles without end.

    PyTorch finds the list of members by its offset, Python by its size: unless they agree, and
    nothing follows, each could see another list. Returns whether it is an archive at all.
    """
    if not _is_archive(file):
        return False
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 98))
    large, link, end = struct.unpack("<56s20s22s", file.read().rjust(98, b"\0"))
    (offset,) = struct.unpack_from("<L", end, 16)
    if is_large := link.startswith(b"PK\6\7"):  # more than 4 GB, or as if
        (offset,) = struct.unpack_from("<Q", large, 48)
    is_linked = large.startswith(b"PK\6\6") and struct.unpack_from("<Q", link, 8) == (size - 98,)
    if not end.startswith(b"PK\5\6") or is_large > is_linked:
        raise zipfile.BadZipFile("not a complete archive")
    if size - offset > _MOST_MEMBERS:
        raise ValueError("it has too many members")
    with zipfile.ZipFile(file) as archive:
        if archive.start_dir != offset:
            raise zipfile.BadZipFile("not a complete archive")
        for member in archive.infolist():
            if member.compress_type:
                raise ValueError("it is compressed, which PyTorch never does")
            if member.filename.endswith("data.pkl") and member.file_size > _MOST_PICKLED:
                raise ValueError("it holds plain values without end")
    return True


def _bare(content: Any) -> Any:
    """Without attributes: the pickle may hide an OrderedDict's `items` or a tensor's `detach`."""
    import torch

    todo, seen = [content], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, OrderedDict | Counter | torch.Tensor):
            vars(value).clear()
        if isinstance(value, dict):
            todo += dict.values(value)
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, Inert):
            todo += value.args, value.state
    return content


def _reason(error: pickle.UnpicklingError) -> str:
    wanted = re.search(r"(?:GLOBAL|global) ([\w.]+\.[\w.]+)", one_line(error))
    if wanted is not None:
        return f"needs {wanted[1]} to be loaded, which could run code"
    return "is not a PyTorch file of tensors and plain values, and could run code"


# ---- the state dict --------------------------------------------------------------------------


def find_state(path: Path, content: Any, state_key: str | None = None) -> State:
    """Find the weights among all that a file holds."""
    if not isinstance(content, Mapping):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{path}: holds {kind}, not a dict of tensors; save model.state_dict()"
        )
    return find_weights(path, content, state_key, is_tensor, _is_weight)


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


def is_tensor(value: object) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _info(path: Path, name: str, tensor: Tensor) -> TensorInfo:
    check_dense(tensor, f"{path}: {name}: ")
    if tensor.nbytes > max(
        path.stat().st_size, tensor.untyped_storage().nbytes()
    ):  # an expanded tensor: one value, repeated
        raise CheckpointError(
            f"{path}: {shown(name, 100)}: is larger than the whole file; save a copy of it"
        )
    return TensorInfo(word_of(tensor.dtype), tuple(tensor.shape))


def check_dense(tensor: Tensor, where: str = "") -> None:
    import torch

    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    if not is_strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"{where}is sparse, nested, quantised or without data; save a dense tensor"
        )


def word_of(dtype: object) -> str:
    """safetensors' word for a dtype; torch's own where safetensors has none."""
    name = str(dtype).removeprefix("torch.")
    return WORDS.get(name, name)


def _metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that Lightning's ModelCheckpoint monitors, and a dict called `metrics`."""
    found = dict(content["metrics"]) if isinstance(content.get("metrics"), Mapping) else {}
    callbacks = content.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        score: Any = state.get("current_score") if isinstance(state, Mapping) else None
        if is_tensor(score) and score.numel() == 1 and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = float(score)
    return plain_numbers(found)
