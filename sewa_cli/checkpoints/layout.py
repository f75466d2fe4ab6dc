"""Find the checkpoints of a run as its trainer left it.

In a folder, the first of these that exists:
  1. folders that are checkpoints (checkpoint-500/, step-20/ …), without a final model next to them
  2. the folder itself, if it is one checkpoint and holds no other weights
  3. files: *.safetensors and sets of them, or *.pt, *.pth, *.bin, *.ckpt; else *.nemo, *.zip
  4. the same where trainers put them: in checkpoints/, lightning_logs/version_0/…
Other files that trainers save (optimizer, scheduler, random state) do not count, nor do copies: by
name (best, average), by step (last) or by their bytes.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from filecmp import cmp
from functools import lru_cache
from glob import has_magic
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import IO

from sewa_cli.checkpoints import adapters, archives, means, modules, pytorch, toolkits
from sewa_cli.checkpoints.checkpoint import (
    REPORT,
    WRITTEN_BY,
    Checkpoint,
    Kind,
    Reads,
    reading,
    stamp_of,
)
from sewa_cli.checkpoints.opening import (
    FSDP,
    MODEL,
    MODEL_BIN,
    OLMO,
    files_of,
    kind_of,
    open_checkpoint,
    weights_in,
)
from sewa_cli.checkpoints.order import is_copy, is_last, scheme, step_in
from sewa_cli.checkpoints.safetensors import INDEX, SUFFIX, is_ours, read_index
from sewa_cli.checkpoints.state import Why
from sewa_cli.errors import CheckpointError, ConfigError, SewaError, Unfinished
from sewa_cli.files import MIB, open_regular, real
from sewa_cli.mirrors import mirror_of
from sewa_cli.text import few, shown, size

_WORDS: dict[Kind, str] = {
    "file": "safetensors file",
    "set": "sharded safetensors set",
    "folder": "checkpoint folder",
    "adapter": "PEFT adapter",
    "torch": "PyTorch file",
    "distributed": "distributed checkpoint",
}
_LEFT: dict[Why, str] = {
    "training": "left out as state of the training",
    "number": "not averaged, as single numbers or integers",
    "copy": "left out as a copy of the weights; --state-key KEY averages it instead",
    "unnamed": "left out, as --state-key names other weights",
    "other": "tensors in it are not averaged; --state-key KEY averages them alone",
}
_NOT_WEIGHTS = re.compile(
    r"(optimizer|optim|scheduler|scaler|rng_state|random_states|training_args)([-_.].*)?"
    r"\.(pt|pth|bin|ckpt|safetensors)"
)
_SHARD = re.compile(r".*-\d{5,}-of-\d{5,}\.(safetensors|bin)")
_FINAL = {MODEL, MODEL + INDEX, MODEL_BIN, MODEL_BIN + INDEX, adapters.WEIGHTS}
MOST_NAMES = 64 * MIB  # of paths on standard input
_PLACES = ("checkpoints", "checkpoint", "save", "lightning_logs/version_*/checkpoints")


def _ignore(_: str) -> None: ...


@dataclass
class Found:
    paths: list[Path] = field(default_factory=list)
    searched: set[Path] = field(default_factory=set)  # those of them that nobody named
    notes: list[str] = field(default_factory=list)


def open_all(
    given: Sequence[Path],
    reads: Reads,
    *,
    state_key: str | None = None,
    keep_ours: bool = False,
    exclude: Sequence[str] = (),
    warn: Callable[[str], None] = _ignore,
    note: Callable[[str], None] = _ignore,
) -> list[Checkpoint]:
    """Find the checkpoints and read their headers.

    The newest in a folder may be half-written by a run that goes on: left out, with a warning.
    """
    found = find(given, keep_ours, exclude)
    opened: list[Checkpoint] = []
    torn: list[tuple[Path, Unfinished]] = []
    for path in found.paths:
        try:
            opened.append(open_checkpoint(path, reads, state_key))
        except Unfinished as error:
            if path not in found.searched:
                raise
            torn.append((path, error))
    for path, fault in torn:
        step = step_in(path)
        others = [c.step for c in opened if c.mean_steps is None]
        others += (step_in(p) for p, _ in torn if p != path)
        if step is None or not opened or any(s is None or s >= step for s in others):
            raise fault
        warn(f"{path}: left out as half-written: {fault}")
    if state_key is not None and opened and not any(_has_keys(c) for c in opened):
        raise ConfigError(
            f"--state-key: {opened[0].path} is safetensors, which has no keys; leave it out"
        )
    snapshots = [c for c in opened if c.mean_steps is None]
    kept = _without_last(snapshots, found, note, warn)
    kept = kept if keep_ours else _without_twins(kept, warn)
    gone = {c.path for c in snapshots} - {c.path for c in kept}
    opened = [c for c in opened if not {c.path, means.snapshot_of(c.path)} & gone]
    for text in found.notes:
        note(text)
    _tell_left(opened, warn, note)
    if opened:
        note(_summary(kept or opened))
    return opened


def _tell_left(
    opened: Sequence[Checkpoint], warn: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Name the tensors that are not averaged."""
    keys: dict[Why, dict[str, Path]] = {}
    for checkpoint in opened:
        for key, why in checkpoint.left.items():
            keys.setdefault(why, {}).setdefault(key, checkpoint.path)
    for why, places in keys.items():
        where, named = next(iter(places.values())), few([shown(key, 40) for key in places], 8)
        text = f"{where}: {named}: {_LEFT[why]}"
        (note if why in ("training", "number") else warn)(text)


def _has_keys(checkpoint: Checkpoint) -> bool:
    in_torch_files = any(file.suffix in pytorch.SUFFIXES for file in checkpoint.files)
    return checkpoint.kind == "distributed" or in_torch_files


def find(given: Sequence[Path], keep_ours: bool = False, exclude: Sequence[str] = ()) -> Found:
    """Find the checkpoints that the user named: folders, files, patterns, or `-` for stdin.

    Averages that sewa wrote into a folder are left out, unless `keep_ours`.
    """
    found = Found()
    for path in chain.from_iterable(map(_matching, given)):
        if str(path) == "-":
            found.paths += _named_on_stdin()
            if not found.paths:
                raise CheckpointError("-: standard input has no paths; write one per line")
        elif _is_folder(path):
            inside = _look_into(path, found.notes, keep_ours, exclude)
            if inside != [path]:  # otherwise the user named the checkpoint itself
                found.searched |= set(inside)
            found.paths += inside + means.means_of(inside)
        else:
            found.paths.append(path)
    found.paths = _without(found.paths, exclude)
    seen: dict[Path, Path] = {}
    for path in sorted(found.paths, key=is_last):
        with reading(path):
            place = real(path)
        first = seen.get(place)
        if first is None:
            seen[place] = path
        elif first != path and {first, path} <= found.searched:
            found.paths.remove(path)
            found.notes.append(f"{path}: left out; it is the same file as {first.name}")
        else:
            raise CheckpointError(f"{place}: is given twice; give each checkpoint once")
    return found


def _matching(path: Path) -> list[Path]:
    """Return what a pattern such as run/epoch-*.pt matches; any other path as it is."""
    if not has_magic(str(path)) or path.exists():
        return [path]
    root = Path(path.anchor)
    if not (found := sorted(root.glob(str(path.relative_to(root))))):
        raise CheckpointError(f"{path}: matches no file or folder; check the pattern")
    return found


def _without(paths: Iterable[Path], exclude: Sequence[str]) -> list[Path]:
    return [path for path in paths if not any(map(path.match, exclude))]


def _is_folder(path: Path) -> bool:
    with reading(path):  # a name may be longer than the system allows
        return path.is_dir()


def _named_on_stdin() -> list[Path]:
    """Read one path a line, or paths ended by NUL bytes, as `find -print0` prints them."""
    data = _read_once(sys.stdin.buffer)
    if len(data) > MOST_NAMES:
        raise CheckpointError(
            f"-: standard input has more than {size(MOST_NAMES)}; name a folder instead"
        )
    text = os.fsdecode(data)
    ended_by_nul = "\0" in text
    names = text.split("\0") if ended_by_nul else map(str.strip, text.split("\n"))
    return [Path(name) for name in names if name]


@lru_cache(maxsize=1)
def _read_once(stdin: IO[bytes]) -> bytes:
    """There is no second time; but a task may ask for the newest before all are opened."""
    return stdin.read(MOST_NAMES + 1)


def _look_into(
    folder: Path, notes: list[str], keep_ours: bool, exclude: Sequence[str]
) -> list[Path]:
    def look(place: Path) -> list[Path]:
        inside = _checkpoints_in(place, notes, exclude)
        return [p for p in inside if keep_ours or p == folder or not _is_ours(p)]

    if inside := look(folder):
        return inside
    places = [p for pattern in _PLACES for p in sorted(folder.glob(pattern)) if p.is_dir()]
    deeper = {place: found for place in places if (found := look(place))}
    if len(deeper) > 1:
        one, two, *_ = deeper
        raise CheckpointError(f"{one}: holds checkpoints, as does {two}; name one of them")
    for place, found in deeper.items():
        notes.append(f"looking in {place}")
        return found
    if runs := [str(p) for p in _entries(folder) if p.is_dir() and _has_checkpoints(p)]:
        which = f"{runs[0]}, which does" if len(runs) == 1 else f"a folder that does: {few(runs)}"
        raise CheckpointError(f"{folder}: holds no checkpoints itself; name {which}")
    raise CheckpointError(
        f"{folder}: holds no *{SUFFIX} files, PyTorch files or checkpoint folders; name "
        "the folder of a run"
    )


def _entries(folder: Path) -> list[Path]:
    """List what is in a folder, without hidden and temporary files and unreadable folders."""
    with reading(folder):
        found = sorted(p for p in folder.iterdir() if not p.name.startswith((".", "tmp-")))
    return [p for p in found if not p.is_dir() or os.access(p, os.R_OK | os.X_OK)]


def _checkpoints_in(folder: Path, notes: list[str], exclude: Sequence[str] = ()) -> list[Path]:
    entries = _without(_entries(folder), exclude)
    folders = _folders([p for p in entries if p.is_dir() and p.name not in (FSDP, OLMO)])
    files = _files([p for p in entries if p.is_file()])
    if any((p / modules.SPEECHBRAIN).is_file() for p in folders):
        files = []  # models that it began with
    exported = [p.name for p in entries if p.suffix == ".nemo" and p not in files and files]
    if exported:
        notes.append(f"{folder}: left out, as the checkpoints are other files: {few(exported)}")
    if toolkit := toolkits.of_run(files, pytorch.mentions):
        own = [p for p in files if re.fullmatch(toolkit.files, p.name)]
        if others := [p.name for p in files if p not in own and not _is_ours(p)]:
            what = f"no checkpoints of {toolkit.name}, but copies, averages or state"
            notes.append(f"{folder}: left out as {what}: {few(others, 8)}")
        files = own
    found = [p for p in (*folders, *files) if not _is_ours(p)]
    copies = {p for p in found if is_copy(p)}
    if copies and not all(p in copies or is_last(p) for p in found):
        names = few([p.name for p in sorted(copies)], 8)
        notes.append(f"{folder}: left out as the best or an average, by name: {names}")
        folders = [p for p in folders if p not in copies]
        files = [p for p in files if p not in copies]
    if any(not _is_ours(p) for p in folders) or (folders and not files):
        apart = [p for p in files if p.name not in _FINAL and not _is_ours(p)]
        if apart:
            raise _mixture(folder, folders[0], apart[0])
        if files:
            notes.append(f"{files[0]}: left out; the checkpoints are the folders next to it")
        _check_alike(folder, folders)
        return folders
    if weights_in(folder) is not None and all(p.name in _FINAL for p in files):
        return [folder]
    _check_alike(folder, [p for p in files if not _is_ours(p)])
    return files


def _folders(entries: Sequence[Path]) -> list[Path]:
    """Folders with weights; and those named like them, which should have weights."""
    real = {p for p in entries if weights_in(p) is not None and not _is_run(p)}
    patterns = {scheme(p) for p in real if step_in(p) is not None}
    return [p for p in entries if p in real or scheme(p) in patterns]


def _is_run(folder: Path) -> bool:
    """A folder of numbered checkpoints is another run, not a checkpoint of this one."""
    inside = [p for p in _entries(folder) if p.is_dir() and p.name not in (FSDP, OLMO)]
    is_whole = (folder / modules.SENTENCES).is_file()  # its folders are modules
    return not is_whole and any(
        step_in(p) is not None and weights_in(p) is not None for p in inside
    )


def _has_checkpoints(folder: Path) -> bool:
    try:
        return _is_run(folder) or any(not _is_ours(p) for p in _checkpoints_in(folder, []))
    except CheckpointError:
        return True  # reported when it is named


def _files(entries: Sequence[Path]) -> list[Path]:
    """Each checkpoint once: sets by their index, not their shards; no links to a neighbour."""
    indices = [p for p in entries if p.name.endswith((SUFFIX + INDEX, ".bin" + INDEX))]
    in_sets: set[Path] = set()
    for index in indices:
        try:
            in_sets |= set(read_index(index).values())
        except SewaError:  # reported when it is opened; its shards are not checkpoints anyway
            in_sets |= {p for p in entries if _SHARD.fullmatch(p.name)}
    single = [
        p
        for p in entries
        if p.suffix in (SUFFIX, *pytorch.SUFFIXES)
        and not _NOT_WEIGHTS.fullmatch(p.name)
        and p not in in_sets
        and not means.is_mean(p)
        and not (p.is_symlink() and real(p).parent == real(p.parent))
    ]
    lone = next((p for p in single if _SHARD.fullmatch(p.name) and not _is_ours(p)), None)
    if lone is not None:
        raise CheckpointError(
            f"{lone}: is a shard of a set, but its index (*{INDEX}) is missing; copy it there"
        )
    files = [*indices, *(p for p in single if p.suffix not in archives.WEIGHTS)]
    return sorted(files) or single or [p for p in entries if p.name.endswith(means.SUFFIX)]


def _check_alike(folder: Path, paths: Sequence[Path]) -> None:
    """One run leaves one kind of checkpoint; two kinds are two runs, or a mistake."""
    first: dict[Kind, Path] = {}
    for path in paths:
        if path.is_dir() and weights_in(path) is None:
            continue  # half-written, whatever it will be
        kind = kind_of(path)
        first.setdefault("file" if kind == "set" else kind, path)
    if len(first) > 1:
        raise _mixture(folder, *list(first.values())[:2])


def _mixture(folder: Path, one: Path, two: Path) -> CheckpointError:
    kinds = (f"{_WORDS[kind_of(path)]}s ({path.name})" for path in (one, two))
    return CheckpointError(f"{folder}: mixes {' with '.join(kinds)}; name the ones you mean")


def _is_ours(path: Path) -> bool:
    """Whether it is an average that an earlier run left among the checkpoints."""
    if kind_of(path) == "torch":
        return pytorch.mentions(path, WRITTEN_BY)
    if kind_of(path) == "distributed":
        return (path / REPORT).exists()
    try:
        files = files_of(path)
    except SewaError:
        return False  # reported when it is opened
    if (path / modules.SPEECHBRAIN).is_file():
        return pytorch.mentions(files[-1], WRITTEN_BY)
    weights = [p for p in files if p.suffix == SUFFIX]
    return bool(weights) and is_ours(weights[0], WRITTEN_BY)


def _without_last(
    opened: list[Checkpoint], found: Found, note: Callable[[str], None], warn: Callable[[str], None]
) -> list[Checkpoint]:
    """Leave out what has no step, or the same as another and is called the last.

    Lightning's last.ckpt has a step of its own where the newest checkpoint was not kept.
    """
    kept = []
    for checkpoint in opened:
        step = None if checkpoint.scheme and is_last(checkpoint.path) else checkpoint.step
        others = [c for c in opened if c is not checkpoint and c.step is not None]
        twin = next((c for c in others if c.step == step), None)
        if checkpoint.path not in found.searched or not others:
            kept.append(checkpoint)
        elif step is None:
            tell = note if is_last(checkpoint.path) else warn
            tell(f"{checkpoint.path}: left out; it has no step, and others have")
        elif twin and (is_last(checkpoint.path) or _is_saved_twice(twin, checkpoint)):
            note(f"{checkpoint.path}: left out; {twin.path.name} has the same step")
        else:
            kept.append(checkpoint)
    return kept


def _is_saved_twice(one: Checkpoint, two: Checkpoint) -> bool:
    """Whether icefall saved an epoch's end that was also due by the number of batches."""
    return two.averaged is not None and one.averaged == two.averaged and one.path < two.path


def _without_twins(opened: Sequence[Checkpoint], warn: Callable[[str], None]) -> list[Checkpoint]:
    """Leave out copies of the same bytes, unless they record different steps."""
    common = Counter(checkpoint.scheme for checkpoint in opened)
    kept: dict[tuple[object, ...], list[Checkpoint]] = {}
    gone: set[Path] = set()
    for checkpoint in sorted(opened, key=lambda c: (-common[c.scheme], c.step or 0)):
        recorded = checkpoint.step if checkpoint.scheme is None else None
        sizes = tuple(checkpoint.stamps[file].size for file in checkpoint.files)
        kept.setdefault((recorded, *sizes), []).append(checkpoint)
    for alike in kept.values():
        unique: dict[bytes, list[Checkpoint]] = {}
        for checkpoint in alike if len(alike) > 1 else ():
            others = unique.setdefault(_sample(checkpoint.files), [])
            twin = next((c for c in others if _has_same_bytes(c.files, checkpoint.files)), None)
            if twin is None:
                others.append(checkpoint)
            else:
                gone.add(checkpoint.path)
                warn(f"{checkpoint.path}: left out; it has the same bytes as {twin.path.name}")
    return [checkpoint for checkpoint in opened if checkpoint.path not in gone]


def _sample(files: Sequence[Path]) -> bytes:
    """Return some bytes of the last file: those of two checkpoints of one run differ."""
    if mirror_of(files[-1]) is not None:
        return repr(stamp_of(files[-1])).encode()
    with reading(files[-1]), open_regular(files[-1]) as file:
        end = file.seek(0, os.SEEK_END)
        parts = []
        for part in range(16):
            file.seek(part * end // 16)
            parts.append(file.read(4096))
        return sha256(b"".join(parts)).digest()


def _has_same_bytes(one: Sequence[Path], two: Sequence[Path]) -> bool:
    if mirror_of(two[-1]) is not None:
        return all(stamp_of(a) == stamp_of(b) for a, b in zip(one, two, strict=True))
    with reading(two[-1]):
        return all(a.samefile(b) or cmp(a, b, shallow=False) for a, b in zip(one, two, strict=True))


def _summary(opened: Sequence[Checkpoint]) -> str:
    """12 Hugging Face checkpoints (checkpoint-100 … checkpoint-1200)"""
    ordered = sorted(opened, key=lambda c: (c.step is None, c.step or 0))
    word = _WORDS[ordered[0].kind]
    if ordered[0].kind == "folder" and (ordered[0].path / "config.json").is_file():
        word = "Hugging Face checkpoint"
    names = " … ".join(dict.fromkeys(c.path.name for c in (ordered[0], ordered[-1])))
    return f"{len(opened)} {word}{'s' if len(opened) > 1 else ''} ({names})"
