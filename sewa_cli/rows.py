"""A session's checkpoints as rows of W, read as they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sewa_cli.checkpoints import Checkpoint, Reads
from sewa_cli.dtypes import Array, as_array
from sewa_cli.errors import CheckpointError
from sewa_cli.opening import Session
from sewa_cli.report.shared import LeftOut
from sewa_cli.trajectory import fill_row
from sewa_cli.trajectory.geometry import WeightSample

BY_NUMPY = (torch.float32, torch.float64, torch.bfloat16)
Run = tuple[int, int, Tensor | Array]  # the first column, the one after the last, and their numbers


class CheckpointRows:
    """The session's checkpoints as rows of W; one with NaN or Inf is left out, or stops the run.

    sample  some weights of each, kept as they are read: where the run stands
    """

    def __init__(self, session: Session) -> None:
        self.layout = session.model.layout
        self.device = session.model.device
        self.count = len(session.checkpoints)
        self._end = max(where.stop for where in self.layout.slices.values())
        self._session = session
        self.sample = WeightSample(self.count, self._end)
        self._broken: dict[int, str | None] = {}  # of those that were read: what is wrong with them
        self._mapped: MappedColumns | None = None

    def left_out(self) -> list[LeftOut]:
        return [
            LeftOut(path=c.name, step=c.step, reason=f"{self._broken[i]} holds NaN or Inf")
            for i, c in enumerate(self._session.checkpoints)
            if self._broken.get(i) is not None
        ]

    @property
    def gather(self) -> Callable[[Sequence[int], slice, Tensor], None] | None:
        """Return `gather` if every checkpoint can be mapped; they stay mapped."""
        checkpoints = self._session.checkpoints
        if self._mapped is None:
            self._mapped = MappedColumns(self._session.reads)
            for checkpoint in checkpoints:
                if (runs := _map_columns(self._session, checkpoint)) is None:
                    break
                self._mapped.runs.append(runs)
        if len(self._mapped.runs) < self.count:
            return None
        for checkpoint in checkpoints:
            checkpoint.check_unchanged()
        return self._mapped.gather

    def settle(self) -> bool:
        """Let all ranks leave out the same ones; return False if one has not, until now."""
        found = [
            {i: why for i, why in one.items() if why is not None}
            for one in self._session.model.ranks.gather(self._broken)
        ]
        every = {i: why for one in reversed(found) for i, why in one.items()}
        self._broken |= every
        return all(one.keys() == every.keys() for one in found)

    def fill(self, i: int, row: Tensor) -> bool:
        session, checkpoint = self._session, self._session.checkpoints[i]
        is_new = i not in self._broken
        if not is_new:  # looked through already; now it must only be the same
            checkpoint.check_unchanged()
        broken = fill_row(row, floats(session, checkpoint), self.layout, check=is_new)
        row[self._end :].zero_()
        checkpoint.close()
        if not is_new:
            return self._broken[i] is None
        self._broken[i] = broken
        session.events.progress("reading", len(self._broken), self.count)
        if broken is None:
            self.sample.keep(i, row)
            return True
        reason = f"{broken} holds NaN or Inf"
        if session.config.nonfinite == "error":
            raise CheckpointError(
                f"{checkpoint.path}: {reason}; --set nonfinite=skip leaves it out"
            )
        session.events.warn(f"{checkpoint.path}: left out: {reason}")
        if len(self.left_out()) == self.count:
            raise CheckpointError(f"all {self.count} checkpoints hold NaN or Inf; none is left")
        return False


def floats(session: Session, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a row of W, by the layout's names."""
    model = session.model
    for name, source in session.names.items():
        if checkpoint.tensors[source].is_float:
            yield model.canonical(name), checkpoint.read(source, model.part(name))


def _map_columns(session: Session, checkpoint: Checkpoint) -> list[Run] | None:
    """Return views of a checkpoint's files in the order of W's columns; None: it has none."""
    model, slices = session.model, session.model.layout.slices
    sources = {model.canonical(name): source for name, source in session.names.items()}
    found: list[Run] = []
    for name in sorted(slices, key=lambda name: slices[name].start):
        views = checkpoint.runs(sources[name], model.part(name))
        if views is None:
            break
        for at, view in views:
            start = slices[name].start + at
            # NumPy copies with less ado; float16 and less torch widens faster
            numbers = as_array(view) if view.dtype in BY_NUMPY else view
            found += [(start, start + view.numel(), numbers)] if view.numel() else []
    checkpoint.close()  # what is mapped stays so, without a descriptor
    return None if views is None else found


@dataclass(frozen=True)
class MappedColumns:
    """Columns of W straight from the mapped files, widened to float32 on the way."""

    reads: Reads
    runs: list[list[Run]] = field(default_factory=list)  # of each checkpoint

    def gather(self, chosen: Sequence[int], columns: slice, out: Tensor) -> None:
        """Columns of these checkpoints into out [r, c]."""
        numbers, read = out.numpy(), 0
        for row, i in enumerate(chosen):
            runs = self.runs[i]
            n = bisect_right(runs, columns.start, key=lambda run: run[1])
            while n < len(runs) and (at := runs[n][0]) < columns.stop:
                begin, end = max(at, columns.start), min(runs[n][1], columns.stop)
                here = slice(begin - columns.start, end - columns.start)
                part = runs[n][2][begin - at : end - at]
                if isinstance(part, Tensor):
                    out[row, here].copy_(part)
                else:
                    numbers[row, here] = part
                read += part.nbytes
                n += 1
        self.reads.add(read)
