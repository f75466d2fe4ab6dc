"""What a result depends on besides the weights, as one hash: code, data, model, versions, device.

Results are recalled under it, and a wrong one would be a wrong number: what may matter is in it.
"""

from __future__ import annotations

import ast
import hashlib
import pickle
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sewa_cli import __version__
from sewa_cli.config import READY_MADE, Config
from sewa_cli.files import MIB, read_bytes, real
from sewa_cli.objective.objective import Objective
from sewa_cli.rng import seeded
from sewa_cli.task import Batches, Task, user_code

AGAIN = 4  # batches that are looked at twice: a loader that shuffles differs from the first one on
CHUNK = 64 * MIB  # of a tensor, for each thread
LIBRARIES = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "datasets", "peft")
_SHA256 = hashlib.sha256
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Unknown(Exception):
    """Something whose content cannot be told; says what, and what may help."""


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


def fingerprint(config: Config, task: Task, objective: Objective) -> str:
    """Of all but the weights. `Unknown` if something that matters cannot be told."""
    data = [task.selection_data, task.heldout_data]
    if objective.batchnorm_layers and config.bn != "off":
        data.append(task.training_data)
    sources, names = _code(config, task)
    return digest(
        *("sewa", __version__, _own_code()),
        *("code", [[path.name, content] for path, content in sorted(sources.items())]),
        *("versions", platform.python_version(), _versions({*LIBRARIES, *names})),
        *("args", config.args, config.seed, objective.batch_statistics),
        *("model", _model(objective)),
        *("device", _device(objective.model.device)),
        *("data", {x.name: of_data(x, config.seed) for x in data if x is not None}),
    )


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


def _device(device: torch.device) -> list[str]:
    about = [str(device), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        about.append(torch.cuda.get_device_name(device))
    return [*about, torch.get_float32_matmul_precision(), str(torch.get_default_dtype())]


# ---- code ----------------------------------------------------------------------------------------


def _own_code() -> str:
    """Ours: a version number may stay while it changes."""
    package = Path(__file__).parents[1]
    return digest([[path.name, path.read_bytes()] for path in sorted(package.rglob("*.py"))])


def _code(config: Config, task: Task) -> tuple[dict[Path, bytes], set[str]]:
    """The user's files, all that they import of the user's own, and what else they import."""
    files = [] if config.solver_from is None else [config.solver_from]
    if task.source not in READY_MADE:
        if not (task.source.endswith(".py") and Path(task.source).is_file()):
            raise Unknown("the task's functions, which are not in a Python file")
        files.append(Path(task.source))
    found: dict[Path, bytes] = {}
    others: set[str] = set()
    left = [real(file) for file in files]
    roots = [*(file.parent for file in left), *_roots()]
    while left:
        path = left.pop()
        if path in found:
            continue
        try:
            found[path] = read_bytes(path, 16 * MIB)
        except OSError as error:
            raise Unknown(f"{path} ({error.strerror})") from error
        for name in _imports(found[path], path, roots):
            files = _files_of(name, roots)
            left += [real(file) for file in files]
            if not files and name.partition(".")[0] not in sys.stdlib_module_names:
                others.add(name.partition(".")[0])
    return found, others


def _roots() -> list[Path]:
    """Where Python looks for modules, but for its own and installed ones."""
    installed = [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "platlib", "purelib")]
    paths = [Path(entry or ".") for entry in sys.path]
    inside = [path for path in paths if not any(path.is_relative_to(one) for one in installed)]
    return [path for path in inside if path.is_dir() and path != Path(__file__).parents[2]]


def _imports(source: bytes, path: Path, roots: Iterable[Path]) -> Iterator[str]:
    """Names of modules, wherever in the file they are imported."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = _package(path, node.level, roots) if node.level else ""
            name = ".".join(part for part in (package, node.module) if part)
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _package(path: Path, level: int, roots: Iterable[Path]) -> str:
    """The dotted name of the folder that a relative import starts from."""
    folder = path.parents[level - 1]
    for root in roots:
        with suppress(ValueError):
            return ".".join(folder.relative_to(real(root)).parts)
    return ""


def _files_of(name: str, roots: Iterable[Path]) -> list[Path]:
    """The files of a module and of the packages around it; none if it is not of the user's."""
    for root in roots:
        here, found = root, list[Path]()
        for part in name.split("."):
            if (module := here / f"{part}.py").is_file():
                return [*found, module]
            here = here / part
            if (module := here / "__init__.py").is_file():
                found.append(module)
        if found:
            return found
    return []


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in sorted(names):
        own = getattr(sys.modules.get(name), "__version__", None)
        found[name] = own if isinstance(own, str) else None
        if found[name] is None:
            with suppress(PackageNotFoundError, ValueError):
                found[name] = version(name)
    return found
