"""Folders with weights in several files: sentence-transformers' modules, SpeechBrain's objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli.checkpoints import pytorch
from sewa_cli.checkpoints import safetensors as tensor_files
from sewa_cli.checkpoints.checkpoint import Header, Reader, reading
from sewa_cli.checkpoints.state import is_training
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.files import MIB, open_regular, parse_json, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

SPEECHBRAIN = "CKPT.yaml"
SENTENCES = "modules.json"
_MOST = 16 * MIB  # of a file that describes the folder
_NUMBER = re.compile(rb"^(\w[\w-]*): ([-+.\de]+)$", re.MULTILINE)
_LOADED = ("model.safetensors", "pytorch_model.bin")


class _Parts(Reader):
    def __init__(self, parts: Mapping[str, Header]) -> None:
        self._parts = parts
        self._readers: dict[str, Reader] = {}

    def _find(self, name: str) -> tuple[Reader, str]:
        prefix = next(p for p, part in self._parts.items() if _inner(name, p) in part.tensors)
        if prefix not in self._readers:
            self._readers[prefix] = self._parts[prefix].open()
        return self._readers[prefix], _inner(name, prefix)

    def read(self, name: str) -> Tensor:
        reader, inner = self._find(name)
        return reader.read(inner)

    def read_array(self, name: str) -> Any:
        reader, inner = self._find(name)
        return reader.read_array(inner)


def _inner(name: str, prefix: str) -> str:
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


def parts_of(folder: Path) -> dict[str, Path]:
    """Return what names begin with → the file of weights; nothing: it is no such folder."""
    if (folder / SPEECHBRAIN).is_file():
        files = _objects(folder)
        return {f"{path.stem}." if len(files) > 1 else "": path for path in files}
    if not (folder / SENTENCES).is_file():
        return {}
    return _modules(folder)


def files_of(folder: Path, parts: Mapping[str, Path]) -> tuple[Path, ...]:
    """Return the file that describes the folder, and those of weights."""
    describing = next(p for name in (SPEECHBRAIN, SENTENCES) if (p := folder / name).is_file())
    return describing, *parts.values()


def _modules(folder: Path) -> dict[str, Path]:
    try:
        with reading(folder):
            modules = parse_json(read_bytes(folder / SENTENCES, _MOST))
    except ValueError as error:
        raise Unfinished(f"{folder / SENTENCES}: is not complete; save it again") from error
    found = {}
    for number, module in enumerate(modules if isinstance(modules, list) else ()):
        place = str(module.get("path", "")) if isinstance(module, dict) else ""
        if place != Path(place).name or place == "..":
            raise CheckpointError(
                f"{folder / SENTENCES}: names {place!r:.100}, which is not in it; copy it there"
            )
        for name in _LOADED:
            if (path := folder / place / name).is_file():
                found[f"{number}." if place else f"{number}.model."] = path
                break
    return found if len(found) != 1 else {"": next(iter(found.values()))}


def _objects(folder: Path) -> list[Path]:
    """List SpeechBrain's files of tensors; its others hold text, or state of the training."""
    found = []
    for path in sorted(folder.glob("*.ckpt")):
        with reading(path), open_regular(path) as file:
            is_saved = file.read(2) == b"PK"
        content = pytorch.load(path) if is_saved else None
        if isinstance(content, dict) and not is_training(path.stem, content):
            with suppress(CheckpointError):  # it has no tensors
                pytorch.find_state(path, content)
                found.append(path)
    if not found:
        raise Unfinished(f"{folder}: has no *.ckpt of weights; save the checkpoint again")
    return found


def open_folder(folder: Path, files: Mapping[str, Path], state_key: str | None) -> Header:
    parts = {}
    for prefix, path in files.items():
        is_torch = path.suffix in pytorch.SUFFIXES
        found = pytorch.open_file(path, state_key) if is_torch else tensor_files.open_file(path)
        parts[prefix] = found
    header = Header(
        tensors={p + name: info for p, one in parts.items() for name, info in one.tensors.items()},
        files=(),
        open=partial(_Parts, parts),
        mapped=all(part.mapped for part in parts.values()),
        left={p + key: why for p, part in parts.items() for key, why in part.left.items()},
        groups=tuple(prefix.removesuffix(".") for prefix in parts),
    )
    header = header if len(parts) > 1 else parts[""]
    header.files = files_of(folder, files)
    if (folder / SPEECHBRAIN).is_file():
        header.step, header.metrics = _speechbrains(folder)
    return header


def _speechbrains(folder: Path) -> tuple[int | None, dict[str, float]]:
    """Return the epoch that its counter has, else the time of the save; and the metrics."""
    with reading(folder):
        text = read_bytes(folder / SPEECHBRAIN, _MOST)
        counter = folder / "counter.ckpt"
        epoch = read_bytes(counter, _MOST) if counter.is_file() else b""
    numbers = {}
    for name, value in _NUMBER.findall(text):
        try:
            numbers[name.decode()] = float(value)
        except ValueError:
            continue
    time = numbers.pop("unixtime", None)
    if epoch.strip().isdigit():
        return int(epoch), numbers
    return None if time is None else int(time), numbers
