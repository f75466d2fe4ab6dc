"""PyTorch's own files: .pt, .pth, .bin and Lightning's .ckpt.

They are pickles, and a pickle can run any code. Only `torch.load(weights_only=True)` ever touches
them: whatever asks for more than tensors and plain Python values is refused, never executed.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sewa_cli.checkpoints.checkpoint import Header, TensorInfo, plain_numbers
from sewa_cli.checkpoints.safetensors import read_index
from sewa_cli.dtypes import Array, as_array
from sewa_cli.errors import CheckpointError, ConfigError, Unfinished

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
STATE_KEYS = ("state_dict", "model", "model_state_dict", "ema")
STEP_KEYS = ("global_step", "step")
LIGHTNING = "pytorch-lightning_version"
WORDS = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


class _Loaded:
    """Loads each file, memory-mapped, at its first tensor."""

    def __init__(self, places: Mapping[str, Path], state_key: str | None, base: Path) -> None:
        self._places = places
        self._base = base
        self._state_key = state_key
        self._states: dict[Path, dict[str, Tensor]] = {}

    def read(self, name: str) -> Tensor:
        path = self._places[name]
        try:
            if path not in self._states:
                self._states[path] = find_state(path, load(path, self._base), self._state_key)[1]
            return self._states[path][name].detach()
        except KeyError:
            raise CheckpointError(f"{path}: {name}: is gone since the file was opened") from None

    def read_array(self, name: str) -> Array:
        return as_array(self.read(name))


def open_file(path: Path, state_key: str | None = None) -> Header:
    content = load(path)
    key, state = find_state(path, content, state_key)
    about = content if key is not None else {}
    step = next((n for word in STEP_KEYS if (n := _whole(about.get(word))) is not None), None)
    tensors = {name: info_of(path, name, tensor) for name, tensor in state.items()}
    reader = partial(_Loaded, dict.fromkeys(tensors, path), state_key)
    return Header(tensors, (path,), reader, step=step, metrics=_metrics(about))


def open_set(index: Path, state_key: str | None = None) -> Header:
    """pytorch_model.bin.index.json and its shards."""
    places = read_index(index)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(places.values())):
        _, state = find_state(shard, load(shard), state_key)
        expected = {name for name, place in places.items() if place == shard}
        for name in sorted(expected - state.keys()):
            raise CheckpointError(
                f"{shard}: holds no {name}; index and file do not belong together"
            )
        tensors |= {name: info_of(shard, name, state[name]) for name in sorted(expected)}
    files = (index, *sorted(set(places.values())))
    return Header(tensors, files, partial(_Loaded, places, state_key))


def load(path: Path, base: Path = Path()) -> Any:
    """What the file holds, its tensors mapped, not read; nothing in it is executed."""
    try:
        with (base / path).open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    is_zip = start == b"PK\x03\x04"
    if not start or (is_zip and not zipfile.is_zipfile(base / path)):
        raise Unfinished(f"{path}: not a whole PyTorch file; remove it or save it again")
    try:
        # files from before PyTorch 1.6 are no zip archives and cannot be mapped: read whole
        return load_plain(base / path, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: {_reason(error)}; refused, nothing of it was run; save its weights as "
            "safetensors where you trust it"
        ) from None
    except Exception as error:  # a torn file fails in many ways
        reason = " ".join(str(error).split())[:160]
        raise Unfinished(f"{path}: cannot be read by PyTorch ({reason}); save it again") from error


def load_plain(source: Path | IO[bytes], mmap: bool = False) -> Any:
    """The one place where torch unpickles; raises whatever it does."""
    import torch

    with suppress(zipfile.BadZipFile), zipfile.ZipFile(source) as archive:
        if any("/data" in m.filename and m.compress_type for m in archive.infolist()):
            raise ValueError("it is compressed, which PyTorch never does")  # a bomb, perhaps
    if not isinstance(source, Path):
        source.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the pickle's version
        return _bare(torch.load(source, map_location="cpu", weights_only=True, mmap=mmap))


def _bare(content: Any) -> Any:
    """Attributes off: an OrderedDict's `items` or a tensor's `detach` may be the pickle's own."""
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
    return content


def _reason(error: pickle.UnpicklingError) -> str:
    text = " ".join(str(error).split())
    wanted = re.search(r"(?:GLOBAL|global) ([\w.]+\.[\w.]+)", text)
    if wanted is not None:
        return f"needs {wanted[1]} to be loaded, which could run code"
    return "is not a PyTorch file of tensors and plain values, and could run code"


def find_state(
    path: Path, content: Any, state_key: str | None = None
) -> tuple[str | None, dict[str, Tensor]]:
    """The dict of tensors, and the key it stands under; None: it is the file itself."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds {_kind(content)}, not a dict of tensors")
    if state_key is not None:
        return state_key, _checked(path, _under(path, content, state_key), state_key)
    if LIGHTNING in content:
        return "state_dict", _checked(path, content.get("state_dict"), "state_dict")
    known = [key for key in STATE_KEYS if isinstance(content.get(key), Mapping)]
    if len(known) > 1:
        raise ConfigError(
            f"{path}: has a state dict under each of {', '.join(known)}; name one with --state-key"
        )
    if known:
        return known[0], _checked(path, content[known[0]], known[0])
    if not any(_is_tensor(value) for value in content.values()):
        there = ", ".join(map(str, content)) or "nothing"
        raise CheckpointError(
            f"{path}: no state dict under {', '.join(STATE_KEYS)}; it holds {there}; name the key "
            "with --state-key"
        )
    return None, _checked(path, content, None)


def _under(path: Path, content: Mapping[str, Any], state_key: str) -> Any:
    """The key as it is, or as a dotted way down: `checkpoint.ema`."""
    if state_key in content:
        return content[state_key]
    here: Any = content
    for part in state_key.split("."):
        if not isinstance(here, Mapping) or part not in here:
            there = ", ".join(map(str, content))
            raise ConfigError(f"{path}: --state-key: no {state_key} in it; it holds {there}")
        here = here[part]
    return here


def _checked(path: Path, state: Any, key: str | None) -> dict[str, Tensor]:
    where = f"{path}: {key}" if key is not None else f"{path}"
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{where}: is {_kind(state)}, not a dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not _is_tensor(value):
            raise CheckpointError(
                f"{where}: {name} is {_kind(value)}, not a tensor; save the tensors alone, or name "
                "their key with --state-key"
            )
    return dict(state)


def _is_tensor(value: object) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def info_of(path: Path, name: str, tensor: Tensor) -> TensorInfo:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{path}: {name}: is sparse, quantised or without data")
    if tensor.nbytes > path.stat().st_size:  # one value, said to be repeated
        raise CheckpointError(f"{path}: {name}: is larger than the whole file; save it as it is")
    return TensorInfo(word_of(tensor.dtype), tuple(tensor.shape))


def word_of(dtype: object) -> str:
    """safetensors' word; of a dtype it has none for, torch's own."""
    name = str(dtype).removeprefix("torch.")
    return WORDS.get(name, name)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """What Lightning's ModelCheckpoint monitors, and a dict called `metrics`."""
    found = dict(content["metrics"]) if isinstance(content.get("metrics"), Mapping) else {}
    callbacks = content.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        score: Any = state.get("current_score") if isinstance(state, Mapping) else None
        if _is_tensor(score) and score.numel() == 1 and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = float(score)
    return plain_numbers(found)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
