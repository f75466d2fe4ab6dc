"""What a result depends on besides the weights, as one hash: code, data, model, versions, device.

Results are recalled under it, and a wrong one would be a wrong number: what may matter is in it.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import getclosurevars, unwrap
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sewa_cli import __version__
from sewa_cli.config import Config
from sewa_cli.files import MIB, real
from sewa_cli.objective.objective import Objective
from sewa_cli.rng import seeded
from sewa_cli.session.code import Unknown, code, file_of, is_own
from sewa_cli.task import Batches, Task, user_code

AGAIN = 4  # batches that are looked at twice: a loader that shuffles differs from the first one on
CHUNK = 64 * MIB  # of a tensor, for each thread
LIBRARIES = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "datasets", "peft")
_SHA256 = hashlib.sha256
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # hooks, parameters, buffers, parts


def digest(*things: Any) -> str:
    """SHA-256 of what they hold, hexadecimal."""
    sha = _SHA256()
    _feed(sha, things)
    return sha.hexdigest()


def _feed(sha: Any, thing: Any) -> None:
    """Each kind with its name and length before it: no two nests give the same bytes."""
    if isinstance(thing, Tensor) and thing.layout == torch.strided and not thing.is_quantized:
        flat = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        _feed_array(sha, f"tensor {thing.dtype} {tuple(thing.shape)}", flat)
    elif isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
        flat = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)
        _feed_array(sha, f"array {thing.dtype.str} {thing.shape}", flat)
    elif thing is None or isinstance(thing, bool | int | float | complex | str | bytes | Path):
        text = thing if isinstance(thing, bytes) else repr(thing).encode(errors="surrogateescape")
        sha.update(f"{type(thing).__name__} {len(text)}:".encode() + text)
    elif isinstance(thing, Mapping):
        sha.update(f"mapping {len(thing)}:".encode())
        for item in thing.items():
            _feed(sha, item)
    elif isinstance(thing, list | tuple):
        sha.update(f"list {len(thing)}:".encode())
        for item in thing:
            _feed(sha, item)
    elif is_dataclass(thing) and not isinstance(thing, type):
        _feed(sha, [type(thing).__qualname__, *(getattr(thing, x.name) for x in fields(thing))])
    else:
        try:  # never to be loaded
            _feed(sha, pickle.dumps(thing))
        except Exception:
            raise Unknown(f"a {type(thing).__name__}, whose content cannot be hashed") from None


def _feed_array(sha: Any, kind: str, flat: np.ndarray[Any, Any]) -> None:
    sha.update(f"{kind}:".encode())
    if len(flat) <= CHUNK:
        sha.update(flat)
        return
    chunks = [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]
    with ThreadPoolExecutor() as pool:  # hashing lets go of Python's lock
        for part in pool.map(lambda chunk: _SHA256(chunk).digest(), chunks):
            sha.update(part)


def fingerprint(config: Config, task: Task, objective: Objective) -> tuple[str, set[Path]]:
    """Of all but the weights, and the user's files in it. `Unknown`: something cannot be told."""
    data = [task.selection_data, task.heldout_data]
    if objective.batchnorm_layers and config.bn != "off":
        data.append(task.training_data)
    batches = {x.name: of_data(x, config.seed) for x in data if x is not None}
    attributes = _Attributes(objective.model.module)
    model = [*_model(objective), attributes.found]
    sources, names = code(config, task, attributes.files)  # last: all that is imported by now
    names |= attributes.packages | {str(config.args.get("model")).partition(":")[0]}
    found = digest(
        *("sewa", __version__, _own_code()),
        *("code", [[path.name, content] for path, content in sorted(sources.items())]),
        *("versions", platform.python_version(), _versions({*LIBRARIES, *names})),
        *("args", config.args, config.seed, objective.batch_statistics),
        *("model", model),
        *("device", _device(objective.model.device)),
        *("data", batches),
    )
    return found, {*sources}


def of_data(data: Batches, seed: int) -> str:
    """Of its batches in their order. `Unknown` if they are others the next time."""
    data = data.apart()
    with seeded(seed), user_code(data.name):
        data.make()  # made once, then gone over twice from the same random numbers
    with seeded(seed):
        every = [digest(batch) for batch in data]
    with seeded(seed):
        again = [digest(batch) for _, batch in zip(range(AGAIN), data, strict=False)]
    if again != every[:AGAIN]:
        raise Unknown(
            f"{data.name}() gives other batches each time (a generator of its own? random crops?)"
        )
    return digest(every)


def _model(objective: Objective) -> list[Any]:
    """What no checkpoint brings: its structure, and state outside of the checkpoints."""
    module = objective.model.module
    bound = {name for names in objective.model.aliases for name in names}
    state = {**module.state_dict(), **dict(module.named_buffers())}
    config = getattr(module, "config", None)
    return [
        _ADDRESS.sub("", repr(module)),
        repr(config) if hasattr(config, "to_dict") else None,
        {name: tensor for name, tensor in sorted(state.items()) if name not in bound},
    ]


class _Attributes:
    """What the parts of a model hold besides tensors of its state, and where their code is."""

    def __init__(self, model: nn.Module) -> None:
        self.files: set[Path] = set()
        self.packages: set[str] = set()
        self._parts = {id(part) for part in model.modules()}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # a number is an object's own as long as that lives
        self.found = {name: self._part(part) for name, part in model.named_modules()}

    def _part(self, part: nn.Module) -> Any:
        if isinstance(part, torch.jit.ScriptModule):
            raise Unknown("a TorchScript model, whose code is in no Python file")
        own = {name: x for name, x in vars(part).items() if name not in _OF_EVERY_MODULE}
        return [self._kind(type(part)), {name: self._value(x) for name, x in own.items()}]

    def _value(self, x: Any) -> Any:
        """As `digest` takes it; of an object of somebody else's making, its class alone."""
        if x is None or isinstance(x, bool | int | float | complex | str | bytes | Path):
            return x
        if isinstance(x, Tensor):
            return "weights" if isinstance(x, nn.Parameter) or x.requires_grad else x
        if isinstance(x, np.ndarray) and not x.dtype.hasobject:
            return x
        if isinstance(x, np.generic | torch.dtype | torch.device | torch.Size | Enum | range):
            return repr(x)
        if isinstance(x, type):
            return self._kind(x)
        if id(x) in self._seen or id(x) in self._parts:
            return "again"
        self._seen.add(id(x))
        self._kept.append(x)
        if isinstance(x, nn.Module):  # that the model does not know as a part of its own
            whole = [repr(x), [*x.state_dict().values()], [*x.buffers()]]
            return [_ADDRESS.sub("", str(whole[0])), *whole[1:], [*map(self._part, x.modules())]]
        if isinstance(x, Mapping):
            return [[self._value(key), self._value(value)] for key, value in x.items()]
        if isinstance(x, list | tuple):
            return [self._value(value) for value in x]
        if isinstance(x, set | frozenset):
            return sorted(digest(self._value(value)) for value in x)
        if isinstance(x, MethodType):
            return [self._value(x.__func__), self._value(x.__self__)]
        if isinstance(x, FunctionType):
            self._code_of(x)
            with suppress(ValueError):  # a name that has no value yet
                values = [x.__defaults__, x.__kwdefaults__, getclosurevars(x).nonlocals]
                return [x.__qualname__, *map(self._value, values)]
            return x.__qualname__
        kind = self._kind(type(x))
        inside = dict(getattr(x, "__dict__", {}))
        if is_dataclass(x):
            inside |= {one.name: getattr(x, one.name, None) for one in fields(x)}
        elif callable(getattr(x, "to_dict", None)):  # a config of transformers
            return [kind, _ADDRESS.sub("", repr(x))]
        elif not (
            isinstance(x, SimpleNamespace | Namespace)
            or is_own(type(x).__module__, file_of(type(x).__module__))
        ):
            return kind
        return [kind, {name: self._value(value) for name, value in inside.items()}]

    def _kind(self, kind: type) -> str:
        """Its name; what is in it is in the files of its code, or in a package's version."""
        for one in kind.__mro__:
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            file = file_of(one.__module__)
            if file is None and issubclass(one, nn.Module):
                raise Unknown(f"the class {one.__qualname__}, which is in no file")
            self._at(one.__module__, file)
            for value in vars(one).values():
                self._code_of(value)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _code_of(self, function: Any) -> None:
        """Also where a module of the same name took the place of its own."""
        function = unwrap(function) if callable(function) else None
        if isinstance(function, FunctionType) and Path(function.__code__.co_filename).is_file():
            self._at(function.__module__ or "", function.__code__.co_filename)

    def _at(self, module: str, file: str | None) -> None:
        package = module.partition(".")[0]
        if file is not None and is_own(module, file):
            self.files.add(real(Path(file)))
        elif package not in sys.stdlib_module_names:
            self.packages.add(package)


def _device(device: torch.device) -> list[str]:
    about = [str(device), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        about.append(torch.cuda.get_device_name(device))
    return [*about, torch.get_float32_matmul_precision(), str(torch.get_default_dtype())]


# ---- code ----------------------------------------------------------------------------------------


@cache
def _own_code() -> str:
    """Ours: a version number may stay while it changes."""
    package = Path(__file__).parents[1]
    return digest([[path.name, path.read_bytes()] for path in sorted(package.rglob("*.py"))])


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in sorted(names):
        # not by getattr, which some packages answer with a warning, or an import
        own = getattr(sys.modules.get(name), "__dict__", {}).get("__version__")
        found[name] = own if isinstance(own, str) else None
        if found[name] is None:
            with suppress(PackageNotFoundError, ValueError):
                found[name] = version(name)
    return found
