"""The processes that work on one command together, each with its part: torchrun's ranks.

Every rank runs the whole program and decides alike, from the same numbers; what differs is which
columns of W it holds and which rows it runs. The engine is torch.distributed. Alone, every method
gives back what it was given, and torch is not imported.

Rank 0 prints. torchrun's agent ends the other ranks when one dies; the rank that was the cause, or
else the first to see that another is gone, claims the one line of the error in torchrun's store.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from sewa_cli.errors import ConfigError, RankLost
from sewa_cli.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from sewa_cli.dtypes import Array

T = TypeVar("T")
MEETING = timedelta(minutes=2)  # for all ranks to be there
SOON = 5.0  # seconds by which ranks that fail alike may be apart
MOMENT = 1.0  # seconds after which torchrun's agent has cleared away a rank that has died
FOREVER = timedelta(days=7)  # what a rank may wait for another; torchrun ends all when one dies


class Ranks:
    """One process alone."""

    rank = 0
    size = 1
    on_this_host = 1
    several = False

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over all ranks, in their order: the same bytes on each."""
        return numbers

    def same(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank."""
        return [value]

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Do the same for tensors of one shape."""
        return [rows]

    def all_come(self) -> bool:
        """Return whether all ranks get here soon, though some may wait for each other elsewhere."""
        return True

    def cause_of(self, error: BaseException, interrupted: bool) -> BaseException | None:
        """Return the error that this rank reports, or None where another rank does.

        `interrupted`: by Ctrl-C, or by torchrun, which ends all ranks when one has died.
        """
        del interrupted  # matters where there are others
        return error

    def send(self, array: Array) -> None:
        raise NotImplementedError

    def receive(self, into: Array, rank: int) -> None:
        raise NotImplementedError

    def rows(self, n: int, rank: int | None = None) -> range:
        """Return which of n a rank has: as many on each, or one more."""
        rank = self.rank if rank is None else rank
        return range(n * rank // self.size, n * (rank + 1) // self.size)

    def columns(self, shape: tuple[int, ...], rank: int | None = None) -> slice:
        """Return which elements of a flat tensor a rank has: whole rows, as FSDP shards.

        Of what has too few rows for all, rank 0 has everything.
        """
        rank = self.rank if rank is None else rank
        first, *rest = shape or (1,)
        width = 1
        for length in rest:
            width *= length
        if first < self.size:
            return slice(0, first * width) if rank == 0 else slice(0, 0)
        each = -(-first // self.size)
        return slice(min(rank * each, first) * width, min((rank + 1) * each, first) * width)


class Torchrun(Ranks):
    """The ranks that torchrun has started."""

    several = True

    def __init__(self) -> None:
        import torch
        from torch import distributed

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Python's own handlers would not be called while torch waits
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            distributed.init_process_group(backend, timeout=MEETING)
        except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            raise ConfigError(
                f"the other ranks of torchrun did not come ({one_line(error, 100)}); "
                "without TORCHELASTIC_RUN_ID in the environment, sewa runs alone"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)
        distributed.distributed_c10d._set_pg_timeout(FOREVER)
        self._torch, self._group, self._calls = torch, distributed, 0
        self._store = distributed.distributed_c10d._get_default_store()
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.size)))
        self._processes = self.gather((socket.gethostname(), os.getpid()))

    def sum(self, numbers: Tensor) -> Tensor:
        parts = self.gather_rows(numbers.detach())
        # float64, by the processor: MPS has none
        total = self._torch.stack([part.cpu().double() for part in parts]).sum(0)
        return total.to(numbers.device, numbers.dtype)

    def same(self, value: T) -> T:
        box = [value]
        self._group.broadcast_object_list(box, src=0, device=self._torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        # by way of the processor, whatever the device is
        self._group.all_gather_object(found, value, group=self._host)
        return found

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        torch, device = self._torch, rows.device
        near = rows.contiguous() if device.type in ("cpu", "cuda") else rows.cpu().contiguous()
        sent = near.reshape(-1).view(torch.uint8) if near.numel() else near.new_empty(0).byte()
        found = [torch.empty_like(sent) for _ in range(self.size)]
        self._group.all_gather(found, sent)
        return [one.view(rows.dtype).view(rows.shape).to(device) for one in found]

    def all_come(self) -> bool:
        store = self._store
        self._calls += 1
        key, end = f"come {self._calls}", time.monotonic() + SOON
        count = store.add(key, 1)
        while count < self.size and time.monotonic() < end:
            time.sleep(0.05)
            count = store.add(key, 0)
        if count < self.size:
            store.add(key, -self.size)  # whoever comes later does not wait
        return bool(count >= self.size)

    def cause_of(self, error: BaseException, interrupted: bool) -> BaseException | None:
        # rank 0 goes first: an error that all have is reported without a rank's number
        end = time.monotonic() + (0 if interrupted else MOMENT if self.rank == 0 else 3 * MOMENT)
        try:
            while not self._store.check(["said"]):
                lost = self._lost()
                if lost is None and time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                own = str(self.rank)
                if self._store.compare_set("said", "", own) != own.encode():
                    return None
                if lost is None:
                    return error
                return RankLost(
                    f"rank {lost} was killed or has ended by itself, torchrun shows its exit code; "
                    "nothing was written"
                )
        except RuntimeError:  # torchrun's agent is gone, and the store with it
            return error
        return None

    def _lost(self) -> int | None:
        """Return a rank whose process on this host is gone."""
        import psutil

        for rank, (host, process) in enumerate(self._processes):
            if host == socket.gethostname() and not psutil.pid_exists(process):
                return rank
        return None

    def send(self, array: Array) -> None:
        self._group.send(self._torch.from_numpy(_bytes(array)), 0)

    def receive(self, into: Array, rank: int) -> None:
        self._group.recv(self._torch.from_numpy(_bytes(into)), rank)

    @property
    def _host(self) -> Any:
        """Objects are gathered by gloo; NCCL would need them on the device."""
        if not self._torch.cuda.is_available():
            return None
        if not hasattr(self, "_gloo"):
            self._gloo = self._group.new_group(backend="gloo", timeout=FOREVER)
        return self._gloo

    def end(self) -> None:
        self.gather(None)  # while one is at work, all are there: whoever is not was lost
        self._group.destroy_process_group()


def _bytes(array: Array) -> Any:
    import numpy as np

    return array.reshape(-1).view(np.uint8)


ALONE = Ranks()
_here: Ranks = ALONE


def here() -> Ranks:
    """Return the ranks that this process is one of. There is one such group, as in torch itself."""
    return _here


def are_several() -> bool:
    """Return whether torchrun has started this process together with others.

    Other launchers set most of these variables too, also for a process that is alone.
    """
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    size = os.environ.get("WORLD_SIZE", "")
    return all(name in os.environ for name in wanted) and size.isdecimal() and int(size) > 1


def join() -> Ranks:
    """Join the other ranks, if there are any."""
    global _here
    if are_several() and not _here.several:
        _here = Torchrun()
    return _here


def leave() -> None:
    """Leave the other ranks; all do this, when all is done, and the process ends."""
    if isinstance(_here, Torchrun):
        _here.end()
