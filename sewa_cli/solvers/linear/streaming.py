"""The checkpoints as a stream that has gone by once: W is never held, and a cache has room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.methods import mean_of
from sewa_cli.report.shared import Placement
from sewa_cli.session.session import Bench, check_budget
from sewa_cli.solvers.linear import Scouted, scout
from sewa_cli.text import size
from sewa_cli.trajectory import Remembered, fill_row
from sewa_cli.trajectory.placement import Placed, cap_of, told_cap, whole

VECTORS = 10  # of length P: two read ahead, the means, the base, the step, what is evaluated


@dataclass(frozen=True)
class Room:
    """Bytes: the cap, what streaming takes of it, and what is left for a cache."""

    cap: int
    named: bool
    work: int

    @property
    def left(self) -> int:
        return self.cap - self.work

    def placement(self, cache: int) -> Placement:
        """With so many bytes of outputs."""
        return Placement(
            tier="files",
            reason="the linear solver streams the checkpoints, and keeps their outputs; the cap is "
            + told_cap(self.cap, self.named),
            cap_bytes=self.cap,
            planned_bytes=self.work + cache,
        )


@dataclass
class Streaming(Placed):
    """W as a stream, what was seen when it went by for the first time, and room for a cache."""

    scouted: Scouted
    room: Room


def find_room(bench: Bench) -> Room:
    cap, named = cap_of(bench)
    work = VECTORS * 4 * bench.model.layout.size
    if cap <= work:
        raise ConfigError(
            f"memory: {size(cap)} are too few: streaming needs {size(work)}, and the outputs more"
        )
    return Room(cap, named, work)


def stream(bench: Bench, K: int) -> Streaming:
    """Read every checkpoint once."""
    layout, device = bench.model.layout, bench.model.device
    found = find_room(bench)
    used: list[Checkpoint] = []

    def rows() -> Iterator[tuple[int, Tensor]]:
        row = torch.empty(layout.size, dtype=torch.float32)
        for checkpoint in whole(bench, row):
            if not used:  # integers are those of a checkpoint, whichever: the newest is not known
                bench.load_integers(bench.checkpoints[-1])
            used.append(checkpoint)
            yield len(used) - 1, row.to(device)

    scouted = scout(rows(), len(bench.checkpoints), judge_of(bench))
    check_budget(K, used)

    def fill(i: int, row: Tensor) -> None:
        broken = fill_row(row, bench.floats(used[i]), layout)
        if broken is not None:
            raise CheckpointError(f"{used[i].path}: {broken} holds NaN or Inf; has it changed?")
        used[i].close()

    trajectory = Remembered(len(used), layout, device, fill)
    trajectory.remember(mean_of(range(len(used)), len(used)), scouted.uniform)
    trajectory.remember(mean_of([len(used) - 1], len(used)), scouted.last)
    left_out = list(bench.left_out)
    return Streaming(trajectory, used, left_out, found.placement(0), scouted, found)


def judge_of(bench: Bench) -> Callable[[Tensor], float]:
    """The true selection loss of weights [P]."""

    def judge(flat: Tensor) -> float:
        bench.model.set(flat)
        try:
            return bench.objective.mean_loss(bench.task.selection_data)[0]
        except ValueError as error:
            raise TaskError(f"selection_data(): {error}") from error

    return judge
