"""Write a file or a folder whole or not at all: under a temporary name next to it, then renamed.

`check_free` refuses a place where that would fail, before the work. A writer holds a lock on its
temporary name; the next writer in the folder removes those that nobody holds.
docs/development/reliability.md says what this promises.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final
from zlib import crc32

from sewa_cli.errors import OutputError
from sewa_cli.files import real

_TEMPORARY: Final = re.compile(r"\.sewa-([0-9a-f]{8})-[0-9a-f]{8}")  # host, random
_HOST: Final = f"{crc32(platform.node().encode()):08x}"
_DAY: Final = 86_400  # seconds


@contextmanager
def new_file(path: Path, force: bool = True) -> Iterator[IO[bytes]]:
    """Open a file to write; it appears at `path`, on the disk, when the block ends well.

    Its `name` is a path too, for libraries that open files themselves.
    """
    with temporary(path.parent) as made:
        with made.open("wb") as file:
            yield file
        sync(made)
        publish(made, path, force)


@contextmanager
def new_output(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """Open a file to write; it appears whole when the block ends, or not at all."""
    with as_output_error(path), new_file(path, force) as file:
        yield file


@contextmanager
def as_output_error(path: Path | str) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise OutputError(f"{path}: appeared while sewa was working; use --force") from error
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_free(path: Path, force: bool, is_ours: Callable[[Path], bool] | None = None) -> None:
    """Refuse, before any work is done, what could not be written in the end.

    With `is_ours`, a folder is to be written; it says whether sewa wrote the folder that is there.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{str(path)!r}: is not a UTF-8 name; choose another") from None
    with as_output_error(path):
        is_there, is_folder = os.path.lexists(path), path.is_dir()
        if is_folder and is_ours is None:
            raise OutputError(f"{path}: is a folder; name a file")
        if is_there and not is_folder and is_ours is not None:
            raise OutputError(f"{path}: is not a folder; choose another name")
        # --force would put a file in the place of a device, a pipe or what /dev/stdout links to
        is_special = path.exists() and not (path.is_file() or is_folder)
        parent = real(path.parent)  # not /dev/shm, which is for anybody's files
        if is_special or parent == Path("/dev") or Path("/proc") in (parent, *parent.parents):
            raise OutputError(
                f"{path}: is not a regular file; name one, or use -o - for standard output"
            )
        if is_there and not force:
            raise OutputError(f"{path}: exists; use --force to replace it, or another name")
        if is_there and is_ours is not None and any(path.iterdir()) and not is_ours(path):
            raise OutputError(
                f"{path}: has files in it that sewa did not write; choose another name"
            )
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent}: no such folder; make it first")
        if not os.access(path.parent, os.W_OK):
            raise OutputError(f"{path.parent}: is not writable; choose another with --output")


@contextmanager
def temporary(parent: Path, is_folder: bool = False) -> Iterator[Path]:
    """Make an empty file or folder to be published; what has its name in the end is removed."""
    _remove_leftovers(parent)
    made, descriptor = parent / _new_name(), None
    try:
        descriptor = _make(made, is_folder)
        yield made
    finally:
        if descriptor is not None:
            os.close(descriptor)
        _remove(made)


def publish(made: Path, target: Path, force: bool) -> None:
    """Give a file or folder its name; `made` is then free, or has what was replaced."""
    if not force and os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    if not (made.is_dir() and os.path.lexists(target)):
        made.replace(target)
    elif not _exchange(made, target):
        aside = target.with_name(_new_name())
        target.rename(aside)  # for a moment there is neither
        try:
            made.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        _remove(aside)
    with suppress(OSError):  # it has its name
        _flush(target.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder and the files inside, to the disk."""
    for file in path.rglob("*") if path.is_dir() else ():
        _flush(file)
    _flush(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs of sewa from changing names in a folder; wait until none does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _new_name() -> str:
    return f".sewa-{_HOST}-{secrets.token_hex(4)}"


def _make(path: Path, is_folder: bool) -> int:
    """Make a file or folder; return a descriptor that locks it."""
    while True:
        path.mkdir() if is_folder else path.touch(exist_ok=False)
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            _lock(descriptor, wait=True)
            if path.exists():  # another run may have removed it before it was locked
                return descriptor
            os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove what dead writers left.

    Some file systems do not show locks to other hosts, so files of another host stay for a day.
    """
    for path in [path for path in folder.glob(".sewa-*") if _TEMPORARY.fullmatch(path.name)]:
        with suppress(OSError):
            is_old = time.time() - path.lstat().st_mtime > _DAY
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if (is_old or path.name[6:14] == _HOST) and _lock(descriptor):
                    _remove(path)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # not every system can flush a folder
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Lock until it is closed or the process ends; False if it is locked or cannot be."""
    with suppress(ImportError, OSError):
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, for which Python has no call; False if the system cannot."""
    import ctypes

    library: Any = ctypes.CDLL(None)
    rename = getattr(library, "renameat2", None)  # only Linux has it
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(here, names[0], here, names[1], exchange) == 0
