"""A memo that outlives the process: `--cache DIR`."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.checkpoints.checkpoint import reading
from sewa_cli.config import Config
from sewa_cli.errors import ConfigError
from sewa_cli.events import Events
from sewa_cli.objective.memo import Key, Memo, Tensors
from sewa_cli.objective.objective import Objective
from sewa_cli.output.safetensors import sha256_of
from sewa_cli.rng import put_back, states
from sewa_cli.session.code import Unknown, imported
from sewa_cli.session.fingerprint import digest, fingerprint
from sewa_cli.store import FILES, Store
from sewa_cli.task import Task
from sewa_cli.text import one_line, shown

RACY = 2 * 10**9  # ns: a file that has just been written may be written again at the same moment
_FORGED = (
    SafetensorError,
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
    OverflowError,
    AssertionError,
)


@dataclass
class Judge:
    """Everything but the weights: named when it is first asked for, as that goes over the data."""

    config: Config
    task: Task
    objective: Objective
    store: Store
    events: Events
    recalled: int = 0
    _files: set[Path] = field(default_factory=set)  # the user's, that are in the name
    _modules: int = 0  # when they were last looked at

    @cached_property
    def name(self) -> str | None:
        """None: something cannot be known, and so nothing can be kept."""
        try:
            found, self._files = fingerprint(self.config, self.task, self.objective)
        except Unknown as error:
            self.events.warn(f"--cache: nothing is kept: it depends on {error}")
            return None
        named = [str(path) for path in self.config.checkpoints]
        about = {"task": self.task.source, "checkpoints": ", ".join(named)[:1000]}
        self.store.describe(found[:16], about)
        return found

    @property
    def knows_all(self) -> bool:
        """Whether the work has imported nothing of the user's that is not in the name."""
        if self._modules != len(sys.modules) and self._modules >= 0:
            self._modules = len(sys.modules)
            if new := sorted(imported() - self._files):
                self.events.warn(
                    f"--cache: nothing more is kept: it depends on {new[0]}, which was imported on "
                    "the way; import it where the task begins"
                )
                self._modules = -1
        return self._modules >= 0


@dataclass
class Kept(Memo):
    """Values under the hash of their key, of the scope and of everything else they depend on."""

    judge: Judge
    scope: Callable[[], Key] = tuple
    _scoped: list[str] = field(default_factory=list)

    @property
    def recalled(self) -> int:  # type: ignore[override]
        return self.judge.recalled

    def within(self, scope: Callable[[], Key]) -> Memo:
        return Kept(self.judge, scope)

    def digest(self, *things: Any) -> Hashable:
        try:
            return digest(*things)
        except Unknown:
            return token_hex(32)  # never seen again

    def recall_all(
        self, key: Key, make: Callable[[], Tensors], fits: Callable[[Tensors], bool]
    ) -> Tensors:
        before = states()
        if (place := self._place((*key, before))) is None:
            return make()
        if (found := self._read(place, fits, before)) is None:
            found = make()
            now = states()
            drawn = {name: now[name] for name, x in before.items() if not torch.equal(x, now[name])}
            self._write(place, found, drawn)
        return found

    def known(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        def fits(found: Tensors) -> bool:
            value = found[""]
            is_such = (value.shape, value.dtype) == (shape, dtype)
            return is_such and bool(torch.isfinite(value).all())

        place = self._place(key)
        found = None if place is None else self._read(place, fits)
        return None if found is None else found[""]

    def keep(self, key: Key, value: Tensor) -> None:
        if (place := self._place(key)) is not None:
            self._write(place, {"": value})

    def _place(self, key: Key) -> tuple[str, str] | None:
        """The group and the key in the store; None: nobody can tell what it depends on."""
        if (judge := self.judge.name) is None:
            return None
        if not self._scoped:
            self._scoped.append(digest(*self.scope()))
        try:
            return judge[:16], digest(judge, self._scoped[0], *key)
        except Unknown:
            return None

    def _read(
        self,
        place: tuple[str, str],
        fits: Callable[[Tensors], bool],
        before: Tensors = MappingProxyType({}),
    ) -> Tensors | None:
        """What was written there, if it fits; the generators are put where it left them.

        `before`: where they are now, and stay if it does not fit.
        """
        body = self.judge.store.read(*place)
        if body is None:
            return None
        try:
            every = [(name.split(" ", 2), value) for name, value in load(body).items()]
            values = sorted((int(n), name, x) for (kind, n, name), x in every if kind == "value")
            found = {name: value for _, name, value in values}
            if not found or any(bool(x.isnan().any()) for x in found.values()) or not fits(found):
                raise ValueError("not what was asked for")
            drawn = {name: value for (kind, _, name), value in every if kind == "drawn"}
            if any(x.shape != before[name].shape for name, x in drawn.items()):
                raise ValueError("not where a generator can be")
            put_back(drawn)
        except _FORGED as error:
            put_back(before)
            self.judge.store.damaged(shown(one_line(error), 100))
            return None
        self.judge.recalled += 1
        return found

    def _write(self, place: tuple[str, str], values: Tensors, drawn: Tensors | None = None) -> None:
        """NaN is never kept, so that one that is read was put there by somebody else."""
        if any(bool(value.isnan().any()) for value in values.values()) or not self.judge.knows_all:
            return
        # in their order, which safetensors does not keep; and no name is one of its own
        tensors = {f"value {n} {name}": x for n, (name, x) in enumerate(values.items())}
        tensors |= {f"drawn 0 {name}": x for name, x in (drawn or {}).items()}
        body = save({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()})
        self.judge.store.write(*place, body)


def open_memo(config: Config, task: Task, objective: Objective, events: Events) -> Memo:
    """Of `--cache`; without it, one that keeps nothing."""
    if config.cache is None:
        return Memo()
    folder = config.cache.absolute()  # the user's code may go elsewhere
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cache: {config.cache}: is not a folder; name another")
    store = Store(folder, config.cache_size, events.warn)
    return Kept(Judge(config, task, objective, store, events))


def hash_files(memo: Kept, checkpoints: Sequence[Checkpoint]) -> list[str]:
    """SHA-256 of each one's files; a file that was hashed before is known by what stat says."""
    store, events = memo.judge.store, memo.judge.events

    def hashed(checkpoint: Checkpoint) -> str:
        files, owner = checkpoint.files, checkpoint.path
        return checkpoint.sha256 or sha256_of(files, owner, partial(_file_hash, store))

    with ThreadPoolExecutor() as pool:
        found = zip(checkpoints, pool.map(hashed, checkpoints), strict=True)
        for n, (checkpoint, sha256) in enumerate(found, 1):
            checkpoint.sha256 = sha256
            events.progress("hashing", n, len(checkpoints))
    return [str(checkpoint.sha256) for checkpoint in checkpoints]


def _file_hash(store: Store, file: Path) -> str:
    began, before = time.time_ns(), _identity(file)
    key = hashlib.sha256(repr(before).encode()).hexdigest()
    known = store.read(FILES, key)
    if known is not None and re.fullmatch(rb"[0-9a-f]{64}", known):
        return known.decode()
    found = sha256_of([file], file)
    *_, modified, changed = before
    if _identity(file) == before and max(modified, changed) < began - RACY:
        store.write(FILES, key, found.encode())
    return found


def _identity(file: Path) -> tuple[int, ...]:
    """What changes with a file; ctime cannot be set back by whoever writes into it."""
    with reading(file):
        about = file.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
