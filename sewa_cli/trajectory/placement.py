"""Where W lives: decided by a cap on memory, told with its reason, and lowered if memory runs out.

    memory   float32 on the device                       4·k·P bytes
    bf16     bfloat16 differences from the mean, there   2·k·P + 4·P, and a few rows in float32
    host     float32 in pinned host memory, streamed     4·k·P on the host   (CUDA only)
    files    streamed from the memory-mapped files       two buffers of a few rows

The cap is for what sewa allocates; Python, torch, the model and the user's data come on top.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.errors import CheckpointError, ConfigError, UserCodeError
from sewa_cli.report.shared import LeftOut, Placement
from sewa_cli.session.session import Bench
from sewa_cli.text import size
from sewa_cli.trajectory import ROWS, Deltas, Streamed, Trajectory, fill_row
from sewa_cli.trajectory.memory import free_on, free_on_host, ran_out

T = TypeVar("T")
Tier = Literal["memory", "bf16", "host", "files"]
SHARE = 0.5  # of what is free, without --memory
STREAM_ROWS = 8  # of a streaming buffer; more would only cost memory
SPARE = 4  # float32 vectors of length P besides the solver's: an average being mixed, rounded …


@dataclass(frozen=True)
class Plan:
    """What each tier would allocate, and which ones fit under the cap, best first."""

    cap: int
    named: bool  # the user said --memory
    needs: dict[Tier, int]
    fitting: list[Tier]
    rows: int  # of a streaming buffer
    share: float = 1.0  # of the cap that W may take; a cache of outputs has the rest

    @property
    def tier(self) -> Tier:
        return self.fitting[0]

    def placement(self, tier: Tier, failed: Sequence[str] = ()) -> Placement:
        cap = told_cap(self.cap, self.named)
        if self.share < 1:
            cap += f", {self.share:.0%} of it for W and the rest for outputs"
        if failed:
            reason = f"memory ran out in the {failed[0]} tier; the cap was {cap}"
        elif tier == "memory":
            reason = f"float32 needs {size(self.needs[tier])}, the cap is {cap}"
        else:
            reason = f"float32 would need {size(self.needs['memory'])}, the cap is {cap}"
        return Placement(
            tier=tier, reason=reason, cap_bytes=self.cap, planned_bytes=self.needs[tier]
        )


def make_plan(bench: Bench, share: float = 1.0) -> Plan:
    """From sizes alone; nothing is allocated. `share`: of the cap, for W."""
    k, P = len(bench.checkpoints), bench.model.layout.size
    device = bench.model.device
    work = 4 * P * (2 * bench.config.gumbel.samples + SPARE)
    cap, named = cap_of(bench)
    for_W = int(share * cap)
    rows = max(1, min(STREAM_ROWS, k, (for_W - work) // (2 * 4 * P)))
    needs: dict[Tier, int] = {
        "memory": 4 * k * P + work,
        "bf16": 2 * k * P + 4 * P * (1 + max(1, min(k, ROWS // 5))) + work,
        "files": 2 * 4 * rows * P + work,
    }
    fitting: list[Tier] = [tier for tier in ("memory", "bf16", "files") if needs[tier] <= for_W]
    if device.type == "cuda" and "memory" not in fitting:
        needs["host"] = needs["files"]  # on the device
        if 4 * k * P <= SHARE * free_on_host():
            at = fitting.index("files") if "files" in fitting else len(fitting)
            fitting.insert(at, "host")
    if not fitting:
        raise ConfigError(
            f"memory: {size(cap)} are too few: the least, streaming from the files, is "
            f"{size(int(needs['files'] / share))}"
        )
    return Plan(cap, named, needs, fitting, rows, share)


def cap_of(bench: Bench) -> tuple[int, bool]:
    """Bytes that may be allocated, and whether the user has named them."""
    if bench.config.memory is not None:
        return bench.config.memory, True
    return int(SHARE * free_on(bench.model.device)), False


def told_cap(cap: int, named: bool) -> str:
    return f"{size(cap)} ({'--memory' if named else 'half of what is free'})"


@dataclass
class Placed:
    """W, the checkpoints in it, those that were left out, and where it lives."""

    trajectory: Trajectory
    used: list[Checkpoint]
    left_out: list[LeftOut]
    placement: Placement


class _NoTierLeft(ConfigError):
    """Memory has run out in every tier that fits under the cap."""


def place(bench: Bench, share: float = 1.0) -> Placed:
    """Read the checkpoints into the best tier that fits and has not failed."""
    plan = make_plan(bench, share)
    left = [tier for tier in plan.fitting if tier not in bench.failed_tiers]
    if not left:
        raise _NoTierLeft(
            f"memory: ran out wherever W was held ({', '.join(bench.failed_tiers)}); smaller "
            "batches in the task need less"
        )
    if bench.failed_tiers:
        bench.warn(f"memory ran out in the {bench.failed_tiers[-1]} tier; trying the next")
    bench.tier = tier = left[0]
    bench.left_out.clear()
    trajectory, used = _build(bench, tier, plan.rows)
    return Placed(trajectory, used, list(bench.left_out), plan.placement(tier, bench.failed_tiers))


def despite_memory(bench: Bench, work: Callable[[], T]) -> T:
    """`work`, which places W; again with W one tier lower, each time that memory runs out in it.

    That may be later than the placing: on a GPU, in the first backward pass. Where nothing is
    lower, and it was the user's code that wanted more, its own frames are shown.
    """
    theirs: UserCodeError | None = None
    while True:
        try:
            return work()
        except _NoTierLeft:
            if theirs is None:
                raise
            raise theirs from None
        except Exception as error:
            if not ran_out(error):
                raise
            if isinstance(error, UserCodeError):
                theirs = UserCodeError(str(error), error.frames)  # the same, but it holds no W
            if bench.tier is None:  # a stream: there is nothing lower
                if theirs is not None:
                    raise
                raise ConfigError(
                    f"memory: ran out: {' '.join(str(error).split())[:200]}; smaller batches in "
                    "the task need less"
                ) from error
            bench.failed_tiers.append(bench.tier)
        # what it held went with the exception, but for what is in cycles
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _build(bench: Bench, tier: Tier, rows: int) -> tuple[Trajectory, list[Checkpoint]]:
    layout, device, k = bench.model.layout, bench.model.device, len(bench.checkpoints)
    if tier == "memory":
        trajectory = Trajectory(k, layout, device)
        return trajectory, list(_append_all(bench, trajectory))
    if tier == "bf16":
        row = torch.empty(layout.size, dtype=torch.float32)
        total = torch.zeros_like(row)
        used = []
        for checkpoint in whole(bench, row):
            used.append(checkpoint)
            total += row
        deltas = Deltas(len(used), layout, device, total / max(len(used), 1))
        for checkpoint in used:
            deltas.append(bench.floats(checkpoint))
            checkpoint.close()
        return deltas, used
    if tier == "host":
        pinned = Trajectory(k, layout, torch.device("cpu"))
        used = list(_append_all(bench, pinned))
        W = pinned.W.pin_memory()
        return Streamed(len(used), layout, device, lambda i, row: _copy(row, W[i]), rows), used
    used = list(whole(bench, torch.empty(layout.size, dtype=torch.float32)))

    def fill(i: int, row: Tensor) -> None:
        broken = fill_row(row, bench.floats(used[i]), layout)
        if broken is not None:
            raise CheckpointError(f"{used[i].path}: {broken} holds NaN or Inf; has it changed?")
        used[i].close()

    return Streamed(len(used), layout, device, fill, rows), used


def _copy(row: Tensor, source: Tensor) -> None:
    row.copy_(source, non_blocking=True)


def _append_all(bench: Bench, trajectory: Trajectory) -> Iterator[Checkpoint]:
    for n, checkpoint in enumerate(bench.checkpoints, 1):
        broken = trajectory.append(bench.floats(checkpoint))
        checkpoint.close()
        if bench.keeps(checkpoint, broken):
            yield checkpoint
        bench.listener.progress("reading", n, len(bench.checkpoints))


def whole(bench: Bench, row: Tensor) -> Iterator[Checkpoint]:
    """The checkpoints without NaN or Inf, each in `row` [P] when it is yielded."""
    for n, checkpoint in enumerate(bench.checkpoints, 1):
        broken = fill_row(row, bench.floats(checkpoint), bench.model.layout)
        checkpoint.close()
        if bench.keeps(checkpoint, broken):
            yield checkpoint
        bench.listener.progress("reading", n, len(bench.checkpoints))
