"""Memory of this process, which is ours alone; from Python, `select` leaves its host's alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

_TRIM_THRESHOLD: Final = -1  # of malloc.h
_MMAP_THRESHOLD: Final = -3


def keep_memory() -> None:
    """Keep memory that a pass, or FSDP, frees again and again, for the next one.

    glibc would give it back to the system, and fresh pages cost more than a ReLU on them does
    (docs/performance.md). Larger blocks still go back.
    """
    from ctypes import CDLL

    with suppress(OSError, AttributeError):  # no glibc
        CDLL(None).mallopt(_MMAP_THRESHOLD, 2**25)  # the largest that it takes
        CDLL(None).mallopt(_TRIM_THRESHOLD, 2**30)
