"""What would end the process without a word: a mapped file that is cut short, no room for imports.

Reading a page that a file no longer has raises SIGBUS, in whatever thread and library reads it.
Python's own handlers run between two of its instructions, and there will be none: this one is
called by the kernel. It only ever says which file it was, and ends the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from sewa_cli.errors import CheckpointError
from sewa_cli.text import shown, size

MAPS = "/proc/self/maps"
_once = Lock()
_CUT = "was cut short while it was being read; try again when nothing writes to it"
_NO_NAME = "a file was cut short while it was being read, its disk failed, or /dev/shm is full"


def check_address_space(least: int) -> None:
    """Under `ulimit -v` what we import would fail halfway, and some of it would abort."""
    with suppress(ImportError):  # Windows has no such module
        import resource

        room, _ = resource.getrlimit(resource.RLIMIT_AS)
        if room != resource.RLIM_INFINITY and room < least:
            raise CheckpointError(
                f"`ulimit -v` leaves {size(room)} of address space, and this takes {size(least)}; "
                "raise it"
            )


@contextmanager
def says_what_was_cut() -> Iterator[None]:
    """In here, reading from a mapped file that is cut short ends the process with a line."""
    if not hasattr(signal, "SIGBUS"):
        yield
        return
    import ctypes

    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(_end)  # must live as long as it may be called
    install = ctypes.CDLL(None).signal
    install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = install(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        install(signal.SIGBUS, before)


def _end(_: int) -> None:
    _once.acquire()  # several threads may read the same file; one says it, and none goes on
    try:
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # below the bars, which hide the cursor
        try:
            file = _cut_short()
        except (OSError, ValueError):  # not every system has /proc
            file = None
        what = _NO_NAME if file is None else f"{shown(file)}: {_CUT}"
        os.write(2, f"error: {what}\n".encode())
    finally:
        os._exit(CheckpointError.exit_code)


def _cut_short() -> Path | None:
    """A mapped file of which the last page is no longer there."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open(MAPS, "rb") as maps:
        for line in maps:
            place, permissions, offset, _, _, path, *_ = [*line.split(None, 5), b""]
            # the gaps between the segments of a library are mapped too, but not to be read
            if path.startswith(b"/") and permissions.startswith(b"r"):
                start, end = (int(each, 16) for each in place.split(b"-"))
                file = Path(os.fsdecode(path.rstrip(b"\n").replace(rb"\012", b"\n")))
                with suppress(OSError):  # removed, and still mapped
                    if file.stat().st_size <= int(offset, 16) + end - start - page:
                        return file
    return None
