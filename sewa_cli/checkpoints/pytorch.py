"""PyTorch's own files: .pt, .pth, .bin and Lightning's .ckpt.

They are pickles, and a pickle can run any code. Only `torch.load(weights_only=True)` ever touches
them: whatever asks for more than tensors and plain Python values is refused, never executed.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sewa_cli.checkpoints.checkpoint import Header, TensorInfo, plain_numbers, reading
from sewa_cli.checkpoints.safetensors import check_holds, read_index, shards_of
from sewa_cli.dtypes import WORDS, Array, as_array
from sewa_cli.errors import CheckpointError, ConfigError, Unfinished
from sewa_cli.files import MIB, open_regular
from sewa_cli.text import few, one_line, shown

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
STATE_KEYS = ("state_dict", "model", "model_state_dict", "ema")
STEP_KEYS = ("global_step", "step")
LIGHTNING = "pytorch-lightning_version"
REFUSED = "refused, none of it was run; where you trust it, save its weights as safetensors"
_ZIP = b"PK\x03\x04"
_MOST_TUPLES = 256  # in a tuple, at any depth
_LONGEST_NAME = 1000
_LONGEST_VALUE = 16 * MIB
_MOST_PICKLED = 64 * MIB  # of a file's pickles; its tensors' bytes are not in them
_MOST_OPCODES = 3_000_000  # of all pickles in a file; a tensor has thirty
_MOST_MEMBERS = 16 * MIB  # of the list of an archive's members, of which each tensor is one


class _Forged(pickle.UnpicklingError): ...


class _Pickled:
    """A file's pickles, read no further than it takes to hold names and plain values."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = _MOST_PICKLED
        self.opcodes = 0
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        self._take(count)
        return self._file.read(count)

    def readline(self) -> bytes:
        line = self._file.readline(_LONGEST_VALUE + 1)
        self._take(len(line))
        return line

    def _take(self, count: int) -> None:
        self._left -= count
        if count > _LONGEST_VALUE or self._left < 0:
            raise _Forged("holds names or plain values without end")


class _Global(int):
    """A name in a pickle, on the stack of `_check_pickle`."""


class _Loaded:
    """Loads each file, memory-mapped, when its first tensor is read."""

    def __init__(self, places: Mapping[str, Path], state_key: str | None, base: Path) -> None:
        self._places = places
        self._base = base
        self._state_key = state_key
        self._states: dict[Path, dict[str, Tensor]] = {}

    def read(self, name: str) -> Tensor:
        path = self._places[name]
        if path not in self._states:
            self._states[path] = find_state(path, load(path, self._base), self._state_key)[1]
        if name not in self._states[path]:
            raise CheckpointError(f"{path}: {name}: has changed since it was opened")
        return self._states[path][name].detach()

    def read_array(self, name: str) -> Array:
        return as_array(self.read(name))


def open_file(path: Path, state_key: str | None = None) -> Header:
    content = load(path)
    key, state = find_state(path, content, state_key)
    about = content if key is not None else {}
    step = next((n for word in STEP_KEYS if type(n := about.get(word)) is int), None)
    tensors = {name: _info(path, name, tensor) for name, tensor in state.items()}
    reader = partial(_Loaded, dict.fromkeys(tensors, path), state_key)
    mapped = _start(path) == _ZIP
    return Header(tensors, (path,), reader, step=step, metrics=_metrics(about), mapped=mapped)


def open_set(index: Path, state_key: str | None = None) -> Header:
    """pytorch_model.bin.index.json and its shards."""
    places = read_index(index)
    tensors: dict[str, TensorInfo] = {}
    for shard, names in shards_of(places).items():
        _, state = find_state(shard, load(shard), state_key)
        check_holds(shard, names, state)
        tensors |= {name: _info(shard, name, state[name]) for name in sorted(names)}
    shards = tuple(shards_of(places))
    mapped = all(_start(shard) == _ZIP for shard in shards)
    return Header(tensors, (index, *shards), partial(_Loaded, places, state_key), mapped=mapped)


def _start(path: Path, base: Path = Path()) -> bytes:
    """Of an archive, `_ZIP`; files from before PyTorch 1.6 are none, and cannot be mapped."""
    with reading(path), open_regular(base / path) as file:
        return file.read(4)


def load(path: Path, base: Path = Path()) -> Any:
    """What the file holds, its tensors mapped, not read; nothing in it is executed."""
    start = _start(path, base)
    try:
        if not start:
            raise zipfile.BadZipFile("empty")
        return load_plain(base / path, mmap=start == _ZIP)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_reason(error)}; {REFUSED}") from None
    except zipfile.BadZipFile as error:
        raise Unfinished(
            f"{path}: not a complete PyTorch file; remove it or save it again"
        ) from error
    except Exception as error:  # a torn file fails in many ways
        reason = one_line(error, 160)
        raise Unfinished(f"{path}: cannot be read by PyTorch ({reason}); save it again") from error


# ---- unpickling ------------------------------------------------------------------------------


def load_plain(source: Path | IO[bytes], mmap: bool = False) -> Any:
    """The one place where torch unpickles; raises whatever it does."""
    import torch

    if isinstance(source, Path):
        with open_regular(source) as file:
            _check_pickles(file)
    else:
        _check_pickles(source)
        source.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the pickle's version
        return _bare(torch.load(source, map_location="cpu", weights_only=True, mmap=mmap))


def _check_pickles(file: IO[bytes]) -> None:
    """All pickles in a file, as torch finds them; what is not a pickle is left for it to name."""
    import torch

    file.seek(0)
    is_zip = file.read(4) == _ZIP
    if is_zip:
        _check_archive(file)
    file.seek(0)
    try:
        if is_zip:
            content = torch._C.PyTorchFileReader(file).get_record("data.pkl")
            _check_pickle(_Pickled(io.BytesIO(content)))
            return
        pickled = _Pickled(file)
        for _ in range(5):  # magic number, protocol, system, content, keys of the storages
            _check_pickle(pickled)
    except UnicodeDecodeError as error:  # torch has more alphabets for names, and would go on
        raise _Forged("holds what is no text") from error
    except ValueError:
        pass


def _check_archive(file: IO[bytes]) -> None:
    """Refuse what is compressed, perhaps a bomb, and lists or pickles without end.

    PyTorch finds the list of members by its offset, Python by its size: unless they agree, and
    nothing follows, each could see another list.
    """
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
        raise _Forged("is an archive of too many members")
    with zipfile.ZipFile(file) as archive:
        if archive.start_dir != offset:
            raise zipfile.BadZipFile("not a complete archive")
        for member in archive.infolist():
            if member.compress_type:
                raise ValueError("it is compressed, which PyTorch never does")
            if member.filename.endswith("data.pkl") and member.file_size > _MOST_PICKLED:
                raise _Forged("holds names or plain values without end")


def _check_pickle(file: _Pickled) -> None:
    """Refuse what would crash or hang the process while torch reads it, or says why it does not.

    Tuples nested without end, as hashing one (a dict's key) does; and calls of anything but a short
    name, as torch searches what it says of them in quadratic time. Follows the pickle's stack
    without building anything: of each value, only how many tuples it holds. A tuple cannot change
    later, so that number is final.
    """
    import pickletools  # slow to import

    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for op, arg, _ in pickletools.genops(file):  # type: ignore[arg-type]
        file.opcodes += 1
        if file.opcodes > _MOST_OPCODES:
            raise _Forged(f"holds more than {_MOST_OPCODES:,} values")
        if op.name == "MEMOIZE" or op.name.endswith("PUT"):
            memo[len(memo) if arg is None else arg] = stack[-1] if stack else 0
        elif op.name == "MARK":
            marks.append(len(stack))
        elif op.stack_before:
            to_mark = pickletools.markobject in op.stack_before
            start = marks.pop() if to_mark and marks else len(stack)
            start = max(0, start - len(op.stack_before) + 2 * to_mark)
            taken = stack[start:]
            is_tuple = op.name.startswith("TUPLE")
            holds = 1 + sum(taken) if is_tuple else max(taken, default=0)
            if holds > _MOST_TUPLES:
                raise _Forged("holds tuples nested without end")
            if op.name in ("REDUCE", "NEWOBJ") and not isinstance((taken or [0])[0], _Global):
                raise _Forged("calls what is no function")
            made = _Global() if op.name == "STACK_GLOBAL" else holds
            stack[start:] = [made] * len(op.stack_after)
        elif op.name == "GLOBAL":
            if len(str(arg)) > _LONGEST_NAME:
                raise _Forged("names a function in too many words")
            stack.append(_Global())
        elif op.stack_after:
            stack.append(memo.get(arg, 0) if op.name.endswith("GET") else 0)


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
    return content


def _reason(error: pickle.UnpicklingError) -> str:
    if isinstance(error, _Forged):
        return str(error)
    wanted = re.search(r"(?:GLOBAL|global) ([\w.]+\.[\w.]+)", one_line(error))
    if wanted is not None:
        return f"needs {wanted[1]} to be loaded, which could run code"
    return "is not a PyTorch file of tensors and plain values, and could run code"


# ---- the state dict --------------------------------------------------------------------------


def find_state(
    path: Path, content: Any, state_key: str | None = None
) -> tuple[str | None, dict[str, Tensor]]:
    """The dict of tensors and the key it is under; None: the file itself is that dict."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds {_kind(content)}, not a dict of tensors")
    key, here = state_key, content
    if state_key is not None and state_key not in content:  # a dotted path: `checkpoint.ema`
        for part in state_key.split("."):
            if not isinstance(here, Mapping) or part not in here:
                raise no_such_key(path, state_key, content)
            here = here[part]
        return state_key, _checked(path, here, state_key)
    if key is None and LIGHTNING in content:
        key = "state_dict"
    elif key is None:
        dicts = [key for key in STATE_KEYS if isinstance(content.get(key), Mapping)]
        key = usual_key(path, dicts, any(map(is_tensor, content.values())), content)
    return key, _checked(path, content if key is None else content.get(key), key)


def usual_key(path: Path, found: Sequence[str], bare: bool, there: Iterable[Any]) -> str | None:
    """The key that trainers put the weights under; None: there is none, but they are `bare`."""
    if len(found) > 1:
        raise ConfigError(
            f"{path}: has a state dict under each of {', '.join(found)}; name one with --state-key"
        )
    if not found and not bare:
        raise CheckpointError(
            f"{path}: no state dict under {', '.join(STATE_KEYS)}; it holds {_few(there)}; name "
            "the key with --state-key"
        )
    return found[0] if found else None


def no_such_key(path: Path, state_key: str, there: Iterable[Any]) -> ConfigError:
    return ConfigError(f"{path}: --state-key: no {state_key} in it; it holds {_few(there)}")


def _few(keys: Iterable[Any]) -> str:
    return few([shown(key, 40) for key in keys], 8) or "nothing"


def _checked(path: Path, state: Any, key: str | None) -> dict[str, Tensor]:
    where = f"{path}: {key}" if key is not None else f"{path}"
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{where}: is {_kind(state)}, not a dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not is_tensor(value):
            raise CheckpointError(
                f"{where}: {shown(name, 100)} is {_kind(value)}, not a tensor; save the tensors "
                "alone, or name their key with --state-key"
            )
    return dict(state)


def is_tensor(value: object) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _info(path: Path, name: str, tensor: Tensor) -> TensorInfo:
    check_dense(tensor, f"{path}: {name}: ")
    if tensor.nbytes > path.stat().st_size:  # an expanded tensor: one value, repeated
        raise CheckpointError(
            f"{path}: {shown(name, 100)}: is larger than the whole file; save a copy of it"
        )
    return TensorInfo(word_of(tensor.dtype), tuple(tensor.shape))


def check_dense(tensor: Tensor, where: str = "") -> None:
    import torch

    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    if not is_strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{where}is sparse, nested, quantised or without data")


def word_of(dtype: object) -> str:
    """safetensors' word for a dtype; torch's own where safetensors has none."""
    name = str(dtype).removeprefix("torch.")
    return WORDS.get(name, name)


def _metrics(content: Mapping[str, Any]) -> dict[str, float]:
    """What Lightning's ModelCheckpoint monitors, and a dict called `metrics`."""
    found = dict(content["metrics"]) if isinstance(content.get("metrics"), Mapping) else {}
    callbacks = content.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        score: Any = state.get("current_score") if isinstance(state, Mapping) else None
        if is_tensor(score) and score.numel() == 1 and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = float(score)
    return plain_numbers(found)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
