"""What writing wants from the system; what is done where it has less.

Linux has all of it on its own file systems. docs/reliability.md says what is lost elsewhere.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from sewa_cli.files import real
from sewa_cli.interrupts import NUMBERS

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_OPEN_FILES = "/proc/self/fd"
_LACKING = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


# ---- files without a name ----------------------------------------------------------------------


def unnamed_file(folder: Path) -> IO[bytes] | None:
    """A file that is gone if we are killed; None: there are none here, or no way to name them."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not Path(_OPEN_FILES).is_dir():
        return None
    with suppress(OSError):  # what is wrong with the folder is told when a file is made in it
        return os.fdopen(os.open(folder, flag | os.O_RDWR, 0o666), "w+b")
    return None


def give_name(file: IO[bytes], path: Path) -> None:
    """A name for a file that has none; fails if it is taken."""
    # without a folder's descriptor, Python would link the link in /proc itself
    os.link(f"{_OPEN_FILES}/{file.fileno()}", path, src_dir_fd=0, follow_symlinks=True)


def copy(file: IO[bytes], path: Path) -> None:
    file.seek(0)
    with path.open("xb") as target:
        shutil.copyfileobj(file, target)
        sync(target)


# ---- names -------------------------------------------------------------------------------------


def exchange(one: Path, other: Path) -> bool:
    """Each has the other's name, at once. False: it cannot be done here, and nothing was."""
    call = _rename_call()
    if call is None:
        return False
    found: int = call(os.fsencode(one), os.fsencode(other))
    if found in _LACKING:
        return False
    if found:
        raise OSError(found, os.strerror(found), str(other))
    return True


@cache
def _rename_call() -> Callable[[bytes, bytes], int] | None:
    """Returns an error's number, or 0. Python has no function for it."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    call: Any
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        call = library.renamex_np
        return lambda one, other: ctypes.get_errno() if call(one, other, _EXCHANGE) else 0
    if hasattr(library, "renameat2"):
        call = library.renameat2
        return lambda one, other: (
            ctypes.get_errno() if call(_HERE, one, _HERE, other, _EXCHANGE) else 0
        )
    return None


def put(source: Path, target: Path) -> None:
    """`source` also, or instead, as `target`, which must be free; a file is never overwritten."""
    if not source.is_dir():
        try:  # unlike a rename, a link fails if somebody else made the file since we looked
            os.link(source, target, follow_symlinks=False)
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            pass
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def replace(source: Path, target: Path, keep: Path) -> None:
    """`source` in the place of `target`, which is kept: as `keep`, or as `source`."""
    if exchange(source, target):
        return
    if not target.is_dir():
        with suppress(OSError):
            os.link(target, keep, follow_symlinks=False)
            os.replace(source, target)
            return
    if not os.path.lexists(keep):
        target.rename(keep)  # for a moment there is neither
    source.rename(target)


def identity(path: Path) -> int | None:
    """Which file of its disk it is, under whatever name; None: there is none.

    Its number alone: that of the disk may be another after the next start.
    """
    try:
        return path.lstat().st_ino
    except (OSError, ValueError):
        return None


def remove(path: Path) -> None:
    """A file or a folder, if it is there and can be."""
    with suppress(OSError, RecursionError):  # a stranger's folder, thousands of levels deep
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# ---- on the disk ---------------------------------------------------------------------------------


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make new names themselves survive a power cut, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        os.close(descriptor)


# ---- locks ---------------------------------------------------------------------------------------


def open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def lock(descriptor: int, wait: bool = False) -> bool | None:
    """Until it is closed or we end, however that is. None: there are no locks here."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextmanager
def locked(folders: Iterable[Path], tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """No other sewa changes names in these folders meanwhile; waits for one that does.

    The folders themselves are locked, so no file is left of it.
    """
    with ExitStack() as stack:
        # each once, in the same order in every process, or two could wait for each other
        places = {
            (s.st_dev, s.st_ino): folder for folder in map(real, folders) for s in [folder.stat()]
        }
        for _, folder in sorted(places.items()):
            descriptor = open_folder(folder)
            stack.callback(os.close, descriptor)
            if lock(descriptor) is False:
                if tell is not None:
                    tell(f"waiting for another process that writes into {folder}")
                lock(descriptor, wait=True)
        yield


# ---- signals -------------------------------------------------------------------------------------


@contextmanager
def held_off() -> Iterator[None]:
    """A signal that asks us to end is answered when the block has ended, not in its middle.

    Only the main thread handles signals, so nothing is to be done in another. A mask would not do:
    another thread would take the signal, and Python still run its handler here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers: dict[int, Any] = {}
    try:
        for number in NUMBERS:
            if signal.getsignal(number) is not None:
                handlers[number] = signal.signal(number, lambda n, _: came.append(n))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            if handlers[number] is not signal.SIG_IGN:
                signal.raise_signal(number)
