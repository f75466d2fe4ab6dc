"""A folder of entries that may go at any time: each is there whole or not at all, the oldest first.

    DIR/CACHEDIR.TAG           backups leave such a folder out
    DIR/<group>/about.json     what the group is of, for people
    DIR/<group>/<key>.entry    a line of ours, the SHA-256 of the rest, the rest

Plain files, put in place by a rename: any number of processes may share them, a kill leaves nothing
half-written, and they work where a database's locks do not (network file systems). Nothing is
flushed to the disk: what a power cut damages is found by its hash, and is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from sewa_cli.files import read_bytes, read_json
from sewa_cli.text import size as shown_size

HEAD: Final = b"sewa cache 1\n"
FILES: Final = "files"  # the group of hashes of files, whatever runs they belong to
ABOUT: Final = "about.json"
TAG: Final = "CACHEDIR.TAG"
TAGGED: Final = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# Made by sewa: `sewa cache` shows what is in it and clears it.\n"
)
_GROUP: Final = re.compile(rf"{FILES}|[0-9a-f]{{16}}")
_ENTRY: Final = re.compile(r"[0-9a-f]{64}\.entry")
_PART: Final = re.compile(r"(?:[0-9a-f]{64}\.entry|about\.json)\.[0-9a-f]{16}\.part")
_MOST_ABOUT: Final = 2**16
_ENOUGH: Final = 0.9  # of the size allowed is left when it was exceeded
_STALE: Final = 3600.0  # seconds: whoever writes an entry for longer than that is dead


@dataclass(frozen=True)
class Group:
    """What belongs to one task and its data: entries, bytes, when any of them was last used."""

    name: str
    about: dict[str, str]
    entries: int
    bytes: int
    used: float  # seconds since 1970


@dataclass
class Store:
    """Entries of at most so many bytes; a folder that cannot be used is told once, by `warn`."""

    folder: Path
    most: int
    warn: Callable[[str], None]
    _is_writing: bool = True
    _bytes: int | None = None  # in it, as far as is known
    _since: int = 0  # bytes written since it was last looked at
    _own: set[Path] = field(default_factory=set)  # entries that this process has used

    def read(self, group: str, key: str) -> bytes | None:
        """None: there is no such entry, or it is damaged."""
        path = self._path(group, key)
        try:
            whole = read_bytes(path, self.most)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.damaged(f"{error.strerror or error}")
            return None
        start = len(HEAD) + hashlib.sha256().digest_size
        body = memoryview(whole)[start:]
        if whole[:start] != HEAD + hashlib.sha256(body).digest():
            self.damaged("not what was written")
            return None
        self._own.add(path)
        with suppress(OSError):  # a folder that is only to be read
            os.utime(path)
        return bytes(body)

    def damaged(self, what: str) -> None:
        self.warn(f"cache {self.folder}: an entry is damaged ({what}); it is worked out anew")

    def write(self, group: str, key: str, body: bytes) -> None:
        """Kept if it can be; if not, the run goes on all the same."""
        if not self._is_writing:
            return
        whole = [HEAD, hashlib.sha256(body).digest(), body]
        length = sum(map(len, whole))
        if length > self.most:
            self.warn(
                f"cache {self.folder}: an entry of {shown_size(length)} is more than cache_size, "
                f"{shown_size(self.most)}; it is not kept"
            )
            return
        path = self._path(group, key)
        try:
            self._put(path, whole)
            self._own.add(path)
            self._make_room(length)
        except OSError as error:
            self._is_writing = False
            self.warn(
                f"cache {self.folder}: cannot be written ({error.strerror or error}); what is "
                "worked out from now on is not kept"
            )

    def describe(self, group: str, about: dict[str, str]) -> None:
        """What the group is of, for whoever looks at the folder."""
        path = self.folder / group / ABOUT
        with suppress(OSError):  # the first entry will tell
            if self._is_writing and not os.path.lexists(path):
                self._put(path, [json.dumps(about, ensure_ascii=False).encode()])

    def _path(self, group: str, key: str) -> Path:
        return self.folder / group / f"{key}.entry"

    def _put(self, path: Path, parts: list[bytes]) -> None:
        self._open(path.parent)
        part = path.with_name(f"{path.name}.{token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            with os.fdopen(os.open(part, flags, 0o666), "wb") as file:
                file.writelines(parts)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _open(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise OSError(f"{folder.name} is a link")
        tag = self.folder / TAG
        if not os.path.lexists(tag):
            tag.write_bytes(TAGGED)

    def _make_room(self, more: int) -> None:
        """The entries that were not used for the longest time go, if there are too many bytes."""
        self._since += more
        if self._bytes is not None and self._since <= self.most // 10:
            self._bytes += more
            if self._bytes <= self.most:
                return
        found = sorted(_entries(self.folder), key=lambda one: one[1].st_mtime_ns)
        self._bytes, self._since = sum(about.st_size for _, about in found), 0
        if self._bytes <= self.most:
            return
        for path, about in found:
            if self._bytes <= _ENOUGH * self.most:
                break
            path.unlink(missing_ok=True)
            self._bytes -= about.st_size
            if path in self._own:
                self.warn(
                    f"cache {self.folder}: cache_size, {shown_size(self.most)}, is too little for "
                    "this run; what it worked out first is dropped"
                )


def groups(folder: Path) -> list[Group]:
    """What is in it, the last used first; OSError if it is no folder."""
    by_group: dict[str, list[os.stat_result]] = {}
    for path, about in _entries(folder):
        by_group.setdefault(path.parent.name, []).append(about)
    found = [
        Group(
            name,
            _about(folder / name / ABOUT),
            len(entries),
            sum(entry.st_size for entry in entries),
            max(entry.st_mtime for entry in entries),
        )
        for name, entries in by_group.items()
    ]
    return sorted(found, key=lambda group: -group.used)


def clear(folder: Path) -> None:
    """Removes what is ours, and nothing else; folders that are empty then."""
    for group in list(_groups(folder)):
        for name, _ in list(_files(group)):
            if name == ABOUT or _ENTRY.fullmatch(name) or _PART.fullmatch(name):
                (group / name).unlink(missing_ok=True)
        with suppress(OSError):  # there is something else in it
            group.rmdir()
    with suppress(OSError):
        if read_bytes(folder / TAG, len(TAGGED)) == TAGGED:
            (folder / TAG).unlink()


def _groups(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if _GROUP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield folder / entry.name


def _files(group: Path) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(FileNotFoundError), os.scandir(group) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # somebody else is clearing up
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    yield entry.name, about


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All entries; what a killed process has left half-written goes on the way."""
    for group in _groups(folder):
        for name, about in _files(group):
            if _ENTRY.fullmatch(name):
                yield group / name, about
            elif _PART.fullmatch(name) and time.time() - about.st_mtime > _STALE:
                with suppress(OSError):
                    (group / name).unlink(missing_ok=True)


def _about(path: Path) -> dict[str, str]:
    """Text from a file: whatever else is in it is left out."""
    try:
        found: Any = read_json(path, _MOST_ABOUT)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
