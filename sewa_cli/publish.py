"""Write a file or a folder whole or not at all: under a temporary name next to it, then renamed.

A temporary name is locked by its writer. What a killed writer left is unlocked, and the next one
that writes into the folder removes it. docs/reliability.md says what this promises.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final
from zlib import crc32

_TEMPORARY: Final = re.compile(r"\.sewa-([0-9a-f]{8})-[0-9a-f]{8}")  # host, random
_DAY: Final = 86_400  # seconds
_HERE: Final = -100  # AT_FDCWD
_NO_REPLACE, _EXCHANGE = (4, 2) if sys.platform == "darwin" else (1, 2)
_LACKING: Final = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
_LOST: Final = {errno.EIO, errno.ENOSPC, errno.EDQUOT}


@contextmanager
def new_file(path: Path, force: bool = True) -> Iterator[IO[bytes]]:
    """Open a file to write; it appears at `path`, on the disk, when the block ends well.

    Its name is a path too, for libraries that open files themselves. Raises FileExistsError if
    there is one and not `force`.
    """
    with temporary(path.parent) as made:
        with made.open("wb") as file:
            yield file
        sync(made)
        publish(made, path, force)


@contextmanager
def temporary(parent: Path, is_folder: bool = False) -> Iterator[Path]:
    """Make an empty file or folder to be published; what has its name in the end is removed."""
    for left in _leftovers(parent):
        _remove(left)
    made, descriptor = parent / _name(), None
    try:
        descriptor = _make(made, is_folder)
        yield made
    finally:
        if descriptor is not None:
            os.close(descriptor)
        _remove(made)


def publish(made: Path, target: Path, force: bool) -> None:
    """Give what was made its name; `made` is then free, or what was replaced."""
    if not force:
        if not _rename(made, target, _NO_REPLACE):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            made.rename(target)
    elif not (made.is_dir() and os.path.lexists(target)):
        made.replace(target)
    elif not _rename(made, target, _EXCHANGE):
        aside = target.with_name(_name())
        target.rename(aside)  # for a moment there is neither
        try:
            made.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        _remove(aside)
    with suppress(OSError):  # it has its name
        sync(target.parent, inside=False)


def sync(path: Path, inside: bool = True) -> None:
    """Flush a file to the disk; or a folder and the files inside."""
    is_folder = path.is_dir()
    for one in path.iterdir() if is_folder and inside else ():
        sync(one)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno in _LOST:  # not every system can flush a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs of sewa from changing names in a folder; wait for one that does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def _name() -> str:
    return f".sewa-{_host()}-{secrets.token_hex(4)}"


def _host() -> str:
    return f"{crc32(platform.node().encode()):08x}"


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


def _leftovers(folder: Path) -> Iterator[Path]:
    """Yield the temporary files and folders of dead writers, locked for as long as they are used.

    Some locks are not seen by other hosts: what another one wrote on this day may be in use.
    """
    try:
        found = [path for path in folder.iterdir() if is_temporary(path.name)]
    except OSError:  # a folder that may be written, but not read
        return
    for path in found:
        with suppress(OSError):
            is_old = time.time() - path.lstat().st_mtime > _DAY
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if (is_old or path.name[6:14] == _host()) and _lock(descriptor):
                    yield path
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be."""
    with suppress(OSError, RecursionError):  # a stranger's folder, thousands of levels deep
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Lock until it is closed or the process ends. False: somebody else has, or there are none."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Rename without replacing, or exchange two names, in one step; Python has no call for it.

    False: the system cannot, and nothing was done.
    """
    import ctypes

    one, other = os.fsencode(source), os.fsencode(target)
    library: Any = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            failed = library.renamex_np(one, other, flag)
        else:
            failed = library.renameat2(_HERE, one, _HERE, other, flag)
    except AttributeError:
        return False
    if failed and (number := ctypes.get_errno()) not in _LACKING:
        raise OSError(number, os.strerror(number), str(target))
    return not failed
