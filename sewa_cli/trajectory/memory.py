"""How much memory there is, and whether it was what ran out."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import psutil
import torch

CGROUPS = (  # where a container's limits stand, version 2 and 1: limit, usage, prefix of its parts
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def free_on(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_on_host()


def free_on_host() -> int:
    """Return the bytes the machine has free, or a container may still take, if less.

    A container that takes more is killed without a word.
    """
    free = int(psutil.virtual_memory().available)
    for folder, limit, usage, prefix in CGROUPS:
        try:
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            lines = (folder / "memory.stat").read_text().splitlines()
            parts = dict(line.split() for line in lines)
            files = [int(parts[f"{prefix}{age}_file"]) for age in ("active", "inactive")]
        except (OSError, ValueError, KeyError):  # none here, or its limit is `max`
            continue
        free = max(0, min(free, most - used + sum(files)))  # cached files are given up on demand
    return free


def ran_out(error: BaseException | None) -> bool:
    """Whether it came about for want of memory, ours or in the user's code."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and re.search(
            r"out of memory|not enough memory|(can't|cannot|failed to) allocate", str(error), re.I
        ):
            return True
        error = error.__cause__
    return False
