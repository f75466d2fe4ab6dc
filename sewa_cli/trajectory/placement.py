"""Placement of W: the first tier that fits under a cap on memory, one lower if it runs out.

    memory   float32 on the device                       4·k·P bytes
    bf16     bfloat16 differences from the mean, there   2·k·P + 4·P, and a few rows in float32
    host     float32 in pinned host memory, streamed     4·k·P on the host   (of a GPU)
    files    streamed from the memory-mapped files       two buffers of a few rows

The cap is for what sewa allocates; Python, torch, the model and the user's data come on top. A new
place for W is a `Trajectory` and a line in TIERS.
"""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from sewa_cli.errors import ConfigError, UserCodeError
from sewa_cli.events import Events
from sewa_cli.ranks import ALONE, Ranks
from sewa_cli.report.shared import Placement
from sewa_cli.text import one_line, size
from sewa_cli.trajectory import Layout, RowSource, Trajectory
from sewa_cli.trajectory.tiers import Deltas, Dense, Streamed, rows_at_once

CGROUPS = (  # where a container's limits stand, version 2 and 1: limit, usage, prefix of its parts
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


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


T = TypeVar("T")
SHARE = 0.5  # of what is free, without --memory
STREAM_ROWS = 8  # of a streaming buffer; more would only cost memory
SPARE = 4  # float32 vectors of length P besides the solver's: an average being mixed, rounded …


@dataclass(frozen=True)
class Cap:
    """Bytes that may be allocated."""

    bytes: int
    named: bool  # the user said --memory

    def __str__(self) -> str:
        return f"{size(self.bytes)} ({'--memory' if self.named else 'half of what is free'})"


def cap_on(device: torch.device, memory: int | None, ranks: Ranks = ALONE) -> Cap:
    """The same on every rank; those of one host share its memory."""
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else free_on_host() // ranks.on_this_host
    return Cap(min(ranks.gather(memory or int(SHARE * free))), memory is not None)


@dataclass(frozen=True)
class TierSizes:
    """TierSizes that a tier is planned by."""

    k: int
    P: int
    device: torch.device
    work: int  # bytes for the solver's vectors and ours
    memory_left: int  # bytes for W and these

    @property
    def rows(self) -> int:
        return max(1, min(STREAM_ROWS, self.k, (self.memory_left - self.work) // (2 * 4 * self.P)))


@dataclass(frozen=True)
class Tier:
    """A place for W: what it allocates on the device, and how it comes about."""

    name: str
    needs: Callable[[TierSizes], int]  # besides `work`
    build: Callable[[RowSource, TierSizes], Trajectory]
    reads: Callable[[int], int]  # products with W → how often each checkpoint's file is read
    holds: bool = False  # W is there in float32: an average needs no file
    is_here: Callable[[TierSizes], bool] = lambda _: True


def _pinned(source: RowSource, sizes: TierSizes) -> Trajectory:
    held = Dense.read(source, torch.device("cpu"))
    return Streamed(_Pinned(held, source.device), sizes.rows, list(range(held.k)))


class _Pinned:
    """Rows of a W in host memory, for the device."""

    def __init__(self, held: Dense, device: torch.device) -> None:
        self.layout: Layout = held.layout
        self.device = device
        self.count = held.k
        self._W = held.W.pin_memory() if device.type == "cuda" else held.W
        self.gather = None

    def fill(self, i: int, row: Tensor) -> bool:
        row.copy_(self._W[i], non_blocking=True)
        return True


TIERS = (  # best first
    Tier(
        "memory",
        lambda s: 4 * s.k * s.P,
        lambda source, _: Dense.read(source),
        lambda _: 1,
        holds=True,
    ),
    Tier(
        "bf16",
        lambda s: 2 * s.k * s.P + 4 * s.P * (1 + rows_at_once(s.k, s.device)),
        lambda source, _: Deltas.read(source),
        lambda _: 2,
    ),
    Tier(
        "host",
        lambda s: 2 * 4 * s.rows * s.P,
        _pinned,
        lambda _: 1,
        holds=True,
        is_here=lambda s: (
            s.device.type not in ("cpu", "mps") and 4 * s.k * s.P <= SHARE * free_on_host()
        ),
    ),
    Tier(
        "files",
        lambda s: 2 * 4 * s.rows * s.P,
        lambda source, s: Streamed.read(source, s.rows),
        lambda products: 1 + products,
    ),
)


@dataclass(frozen=True)
class Placed:
    """W, and where it lives; `memory_left`: bytes under the cap that it leaves."""

    trajectory: Trajectory
    placement: Placement
    memory_left: int


class _NoTierLeft(ConfigError):
    """Memory has run out in every tier that fits under the cap."""


class _AllRanOut(MemoryError):
    """Memory has run out on one rank at least; all know it and go on together."""


class Placer:
    """Finds a place for W, and a lower one each time that memory runs out.

    `vectors`: of length P, for the solver. `share`: of the cap that W may take; a cache of outputs
    has the rest. `only`: the tier that the user named.
    """

    def __init__(
        self,
        source: RowSource,
        cap: Cap,
        vectors: int,
        events: Events,
        share: float = 1.0,
        only: str | None = None,
        ranks: Ranks = ALONE,
        settle: Callable[[], bool] = lambda: True,
        streams: bool = False,
    ) -> None:
        """Set a plan.

        `settle`: all ranks leave out the same; False if one has not, and all look again.
        `streams`: W is not held; the solver passes over the checkpoints.
        """
        self.streams = streams
        self._source = source
        self._ranks = ranks
        self._settle = settle
        self.cap = cap
        self._events = events
        self._share = share
        P = source.layout.size
        work = 4 * P * (vectors + SPARE)
        self.sizes = TierSizes(source.count, P, source.device, work, int(share * cap.bytes))
        known = [tier.name for tier in TIERS]
        if only not in (None, *known):
            raise ConfigError(f"tier: must be one of {', '.join(known)}, found {only!r}")
        self._only = only
        self._failed: list[str] = []
        self._now: Tier | None = None

    def needs(self, tier: Tier) -> int:
        return tier.needs(self.sizes) + self.sizes.work

    def fitting(self) -> list[Tier]:
        if self._only is not None:
            [named] = [tier for tier in TIERS if tier.name == self._only]
            if not named.is_here(self.sizes):
                raise ConfigError(
                    f"tier: {self._only} is not possible on {self.sizes.device}; leave it out"
                )
            return [named]
        small = [tier for tier in TIERS if self.needs(tier) <= self.sizes.memory_left]
        found = [tier for tier in small if tier.is_here(self.sizes)]
        if not found:
            least = int(self.needs(TIERS[-1]) / self._share)
            raise ConfigError(
                f"memory: {size(self.cap.bytes)} is too little: streaming from the files "
                f"needs {size(least)}; raise --memory"
            )
        return found

    def plan(self, tier: Tier | None) -> tuple[Placement, int]:
        """Return a tier's placement, and the bytes that it leaves; None: a stream."""
        cap = str(self.cap)
        needs = self.sizes.work + (2 * 4 * self.sizes.P if tier is None else tier.needs(self.sizes))
        if tier is None and self.cap.bytes <= needs:
            raise ConfigError(
                f"memory: {size(self.cap.bytes)} is too little: streaming needs more than "
                f"{size(needs)}; raise --memory"
            )
        if self._share < 1:
            cap += f", {self._share:.0%} of it for W and the rest for outputs"
        if tier is None:
            reason = f"the solver reads them one by one and keeps none; the cap is {cap}"
        elif self._failed:
            reason = f"memory ran out in the {self._failed[0]} tier; the cap was {cap}"
        else:
            need = "needs" if tier is TIERS[0] else "would need"
            reason = f"float32 {need} {size(self.needs(TIERS[0]))}, the cap is {cap}"
        placement = Placement(
            tier=TIERS[-1].name if tier is None else tier.name,
            reason=reason,
            cap_bytes=self.cap.bytes,
            planned_bytes=needs,
        )
        return placement, self.cap.bytes - needs

    def place(self) -> Placed:
        """Read the checkpoints into the best tier that fits and has not failed, or stream them."""
        if self.streams:
            placement, memory_left = self.plan(None)
            return Placed(Streamed(self._source, ranks=self._ranks), placement, memory_left)
        left = [tier for tier in self.fitting() if tier.name not in self._failed]
        if not left:
            raise _NoTierLeft(
                f"memory: ran out wherever W was held ({', '.join(self._failed)}); smaller batches "
                "in the task need less"
            )
        if self._failed:
            self._events.warn(f"memory ran out in the {self._failed[-1]} tier; trying the next")
        self._now = left[0]
        built = self._build(self._now)
        built.ranks = self._ranks
        return Placed(built, *self.plan(self._now))

    def _build(self, tier: Tier) -> Trajectory:
        """On all ranks, or on none: the tier is the same on all."""
        if not self._ranks.several:
            return tier.build(self._source, self.sizes)
        built, error = None, None
        try:
            built = tier.build(self._source, self.sizes)
        except Exception as raised:
            if not ran_out(raised):
                raise
            error = raised
        failed = [r for r, no in enumerate(self._ranks.gather(error is not None)) if no]
        if built is None or failed:
            raise _AllRanOut(f"rank {failed[0]} has run out of memory") from error
        # NaN in the columns of one rank: the others have found out now, and leave it out too
        return built if self._settle() else self._build(tier)

    def retry(self, work: Callable[[], T]) -> T:
        """`work`, which places W; again with W one tier lower, each time that memory runs out.

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
                if self._ranks.several and not isinstance(error, _AllRanOut):
                    # the others are in the midst of a step, and wait for this one
                    if isinstance(error, UserCodeError):
                        raise
                    raise ConfigError(
                        f"memory: ran out: {one_line(error, 200)}; a lower tier "
                        "(--set tier=bf16, --set tier=files) or smaller batches need less"
                    ) from error
                if isinstance(error, UserCodeError):
                    theirs = UserCodeError(str(error), error.frames)  # the same, but it holds no W
                if self._now is None:  # a stream: there is nothing lower
                    if theirs is not None:
                        raise
                    raise ConfigError(
                        f"memory: ran out: {one_line(error, 200)}; smaller batches in the task "
                        "need less"
                    ) from error
                self._failed.append(self._now.name)
            # what it held went with the exception, but for what is in cycles
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
