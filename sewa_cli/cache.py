"""Results of the model in the folder of `--cache`: the same command goes on there after a kill.

    DIR/<two digits>/<SHA-256 of the key>    a checksum of name and content, then safetensors

The key of a result has the key of the run, which says all that any result depends on, and what
the result is of: weights, data, batches, by their content.
"""

from __future__ import annotations

import pickle
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sewa_cli import __version__
from sewa_cli.checkpoints import Checkpoint
from sewa_cli.config import READY_MADE, Config
from sewa_cli.errors import ConfigError
from sewa_cli.events import Events
from sewa_cli.files import MIB, open_regular
from sewa_cli.mirrors import named
from sewa_cli.objective.memo import Key, Memo, Tensors
from sewa_cli.publish import new_file
from sewa_cli.report.shared import Named

CHUNK: Final = 64 * MIB  # of a tensor, for each thread that hashes
MOST: Final = 2**16 * MIB  # that is read of an entry
LIBRARIES: Final = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "peft")
# a run that differs in these alone works out the same
WITHOUT: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("cache", "checkpoints", "output", "report", "scratch", "scratch_size", "strict"), True
    ),
    "objective": {"budget", "incumbent", "part_timeout", "workers"},
}
_DIGEST: Final = sha256().digest_size


class Judging(Named, Protocol):
    """All that results depend on besides checkpoints and settings: a task, or a command."""

    @property
    def files(self) -> Sequence[Path]: ...
    @property
    def cache_key(self) -> Callable[[], str] | None: ...


class Cache(Memo):
    """A memo in files. An entry that is torn, damaged or of another key is as good as none."""

    def __init__(self, folder: Path, run: str, events: Events) -> None:
        self._recalled: dict[str, bool] = {}  # name → whether it was there when first asked for
        self._folder = folder
        self._run = run
        self._events = events
        self._is_writable = True

    @property
    def recalled(self) -> int:
        return sum(self._recalled.values())

    def known(self, key: Key) -> Tensors | None:
        path = self._path(key)
        found = self._read(path)
        self._recalled.setdefault(path.name, found is not None)
        return found

    def _read(self, path: Path) -> Tensors | None:
        try:
            with open_regular(path, MOST) as file:
                checksum, body = file.read(_DIGEST), file.read()
            if checksum != _checksum(path, body):
                return None
            numbered = [(name.partition(" "), x) for name, x in load(body).items()]
            return {name: x for (_, _, name), x in sorted(numbered, key=lambda one: int(one[0][0]))}
        except (OSError, SafetensorError, ValueError, LookupError):
            return None

    def keep(self, key: Key, found: Tensors) -> None:
        if not self._is_writable:
            return
        # in their order, which safetensors does not keep; and no name is one of its own
        numbered = {f"{n} {name}": x for n, (name, x) in enumerate(found.items())}
        body = save({name: x.detach().cpu().contiguous().clone() for name, x in numbered.items()})
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                file.write(_checksum(path, body))
                file.write(body)
        except OSError as error:
            self._is_writable = False
            self._events.warn(
                f"cache: {self._folder}: cannot be written ({error.strerror or error}); later "
                "results are not kept"
            )

    def digest(self, *things: Any) -> str:
        return digest(*things)

    def _path(self, key: Key) -> Path:
        name = digest(self._run, *key)
        return self._folder / name[:2] / name


def open_cache(
    config: Config,
    task: Judging,
    checkpoints: Sequence[Checkpoint],
    device: torch.device,
    events: Events,
) -> Cache:
    assert config.cache is not None
    folder = config.cache.absolute()  # the user's code may go elsewhere
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cache: {config.cache}: is not a folder; name another")
    run = _key_of_run(config, task, checkpoints, device)
    return Cache(folder, run, events)


def _key_of_run(
    config: Config, task: Judging, checkpoints: Sequence[Checkpoint], device: torch.device
) -> str:
    """Return a hash of all that results depend on besides their own weights and data."""
    if task.sha256 is None and task.source not in READY_MADE:
        raise ConfigError(
            f"cache: the functions of {task.source} are in no Python file, so that a change would "
            "not be noticed; name a task file, or leave out the cache"
        )
    read = [config.solver_from, config.compare.methods_from, *task.files, *_files(config.args)]
    versions = {"sewa": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return digest(
        versions,
        str(device),
        [task.source, task.sha256, task.cache_key() if task.cache_key else None],
        config.model_dump(mode="json", exclude=WITHOUT),
        [
            [
                *(named(one.path.absolute()), named(repr(one.stamps))),
                *(repr(one.tensors), repr(one.metadata)),
            ]
            for one in checkpoints
        ],
        [_identity(path) for path in read if path is not None],
    )


def _files(args: Any) -> Iterator[Path]:
    """Yield the files that arguments name, also as `net.py:make_net` or `package.net:make_net`."""
    if isinstance(args, Mapping | list | tuple):
        for one in args.values() if isinstance(args, Mapping) else args:
            yield from _files(one)
    elif isinstance(args, str):
        module = args.rpartition(":")[0]
        for name in (args, module, getattr(sys.modules.get(module), "__file__", None)):
            with suppress(OSError, ValueError):
                if name and Path(name).is_file():
                    yield Path(name)


def _identity(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of a file, or of each file in a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    return [(name, about.st_size, about.st_mtime_ns) for name, about in found]


def _checksum(path: Path, body: bytes) -> bytes:
    sha = sha256(path.name.encode())
    sha.update(body)
    return sha.digest()


def digest(*things: Any) -> str:
    """Return the SHA-256 of their content; of what cannot be pickled, a name never seen again."""
    stream = BytesIO()
    pickler = _Pickler(stream, protocol=5)
    pickler.fast = True  # equal values are the same bytes, whether they are one object or two
    try:
        pickler.dump(things)
    except Exception:  # whatever the user's batches hold
        return token_hex(_DIGEST)
    return sha256(stream.getbuffer()).hexdigest()


class _Pickler(pickle.Pickler):
    """Write values to be hashed, tensors as dtype, shape and hashes. Nothing of it is ever read."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return NotImplemented
        flat = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        with ThreadPoolExecutor() as pool:  # hashing lets go of Python's lock
            chunks = torch.split(flat, CHUNK)
            hashes = pool.map(lambda chunk: sha256(chunk.numpy()).digest(), chunks)
            return tuple, ((str(thing.dtype), tuple(thing.shape), *hashes),)
