"""Memory of the command's own process; `select` from Python leaves its host's alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from sewa_cli.errors import CheckpointError
from sewa_cli.text import size

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


def check_address_space(least: int) -> None:
    """Refuse a `ulimit -v` under which imports would fail halfway, and some of them abort."""
    with suppress(ImportError):  # Windows has no such module
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and limit < least:
            raise CheckpointError(
                f"`ulimit -v` leaves {size(limit)} of address space, and this takes {size(least)}; "
                "raise it"
            )
