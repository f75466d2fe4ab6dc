"""What a run has cost, and what its output says of itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sewa_cli import __version__
from sewa_cli.checkpoints import WRITTEN_BY
from sewa_cli.output.average import Averaged
from sewa_cli.report.shared import Cost, Seconds

if TYPE_CHECKING:
    import torch

    from sewa_cli.session.session import Bench


def metadata_of(averaged: Averaged, method: str, K: int | None) -> dict[str, str]:
    """Strings only, as safetensors wants; `format` is what transformers looks for."""
    steps = [c.step if c.step is not None else c.path.name for c in averaged.sources]
    about = {
        "format": "pt",
        WRITTEN_BY: __version__,
        "sewa_method": method,
        "sewa_steps": ",".join(map(str, steps)),
    }
    if len(set(averaged.coefficients)) > 1:
        about["sewa_coefficients"] = ",".join(map(str, averaged.coefficients))
    return about if K is None else {**about, "sewa_K": str(K)}


def _peak_memory() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_device_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(device)


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

    def seconds(self) -> Seconds:
        return Seconds(total=time.perf_counter() - self.started, **self.stages)


def total_cost(bench: Bench, clock: Clock) -> Cost:
    return Cost(
        seconds=clock.seconds(),
        forward_passes=bench.objective.passes.forward,
        backward_passes=bench.objective.passes.backward,
        bytes_read=bench.reads.bytes,
        peak_memory_bytes=_peak_memory(),
        peak_device_memory_bytes=_peak_device_memory(bench.model.device),
    )
