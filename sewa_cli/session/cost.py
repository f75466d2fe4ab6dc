"""The cost of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sewa_cli.checkpoints import Reads
from sewa_cli.objective.objective import Passes
from sewa_cli.report.shared import Cost, Seconds


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.stages: dict[str, float] = {"read": 0.0, "learn": 0.0, "evaluate": 0.0, "write": 0.0}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] += time.perf_counter() - start

    def cost(
        self, device: torch.device, passes: Passes, reads: Reads, recalled: int | None
    ) -> Cost:
        """Return the cost of all that was done so far."""
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Cost(
            seconds=Seconds(total=time.perf_counter() - self.started, **self.stages),
            forward_passes=passes.forward,
            backward_passes=passes.backward,
            bytes_read=reads.bytes,
            peak_memory_bytes=peak_memory(),
            peak_device_memory_bytes=on_device,
            recalled=recalled,
        )


def peak_memory() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
