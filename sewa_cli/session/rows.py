"""The checkpoints as rows of W, whole or in columns, straight from their files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sewa_cli.dtypes import Array, as_array
from sewa_cli.errors import CheckpointError
from sewa_cli.report.shared import LeftOut, Standing
from sewa_cli.trajectory import fill_row
from sewa_cli.trajectory.standing import WeightSample

if TYPE_CHECKING:
    from sewa_cli.session.session import Session

BY_NUMPY = (torch.float32, torch.float64, torch.bfloat16)


class CheckpointRows:
    """The session's checkpoints as rows of W; one with NaN or Inf is left out, or stops the run."""

    def __init__(self, session: Session) -> None:
        self.layout = session.model.layout
        self.device = session.device
        self.count = len(session.checkpoints)
        self._end = max(where.stop for where in self.layout.slices.values())
        self._session = session
        self._sample = WeightSample(self.count, self._end)
        self._broken: dict[int, str | None] = {}  # of those that were read: what is wrong with them
        self._mapped: _MappedColumns | None = None

    @property
    def left_out(self) -> list[LeftOut]:
        return [
            LeftOut(path=str(c.path), step=c.step, reason=f"{self._broken[i]} holds NaN or Inf")
            for i, c in enumerate(self._session.checkpoints)
            if self._broken.get(i) is not None
        ]

    def standing(self, used: Sequence[int]) -> Standing | None:
        """Return where the run stands, by a sample that was kept as they were read."""
        steps = [self._session.checkpoints[i].step for i in used]
        return self._sample.standing(used, steps, self._session.ranks)

    @property
    def gather(self) -> Callable[[Sequence[int], slice, Tensor], None] | None:
        """Return `gather` if every checkpoint can be mapped; they stay mapped."""
        if self._mapped is None:
            self._mapped = _MappedColumns(self._session)
        if not self._mapped.is_whole:
            return None
        for checkpoint in self._session.checkpoints:
            checkpoint.check_unchanged()
        return self._mapped.gather

    def settle(self) -> bool:
        """Let all ranks leave out the same ones; return False if one has not, until now."""
        found = [
            {i: why for i, why in one.items() if why is not None}
            for one in self._session.ranks.gather(self._broken)
        ]
        every = {i: why for one in reversed(found) for i, why in one.items()}
        self._broken |= every
        return all(one.keys() == every.keys() for one in found)

    def fill(self, i: int, row: Tensor) -> bool:
        session, checkpoint = self._session, self._session.checkpoints[i]
        is_new = i not in self._broken
        if not is_new:  # looked through already; now it must only be the same
            checkpoint.check_unchanged()
        broken = fill_row(row, session.floats(checkpoint), self.layout, check=is_new)
        row[self._end :].zero_()
        checkpoint.close()
        if not is_new:
            return self._broken[i] is None
        self._broken[i] = broken
        session.events.progress("reading", len(self._broken), self.count)
        if broken is not None:
            reason = f"{broken} holds NaN or Inf"
            if session.config.nonfinite == "error":
                raise CheckpointError(
                    f"{checkpoint.path}: {reason}; --set nonfinite=skip leaves it out"
                )
            session.events.warn(f"{checkpoint.path}: left out: {reason}")
            if len(self.left_out) == self.count:
                raise CheckpointError(f"all {self.count} checkpoints hold NaN or Inf; none is left")
        else:
            self._sample.keep(i, row)
        return broken is None


class _MappedColumns:
    """Columns of W straight from the mapped files, widened to float32 on the way."""

    def __init__(self, session: Session) -> None:
        model, layout = session.model, session.model.layout
        sources = {model.canonical(name): source for name, source in session.names.items()}
        ordered = sorted(layout.slices, key=lambda name: layout.slices[name].start)
        self._reads = session.reads
        self._runs: list[_Runs] = []
        for checkpoint in session.checkpoints:
            found = [
                (layout.slices[name].start, checkpoint.runs(sources[name], model.part(name)))
                for name in ordered
            ]
            checkpoint.close()  # what is mapped stays so, without a descriptor
            if any(runs is None for _, runs in found):
                break
            self._runs.append(
                _Runs([(start + at, view) for start, runs in found for at, view in runs or ()])
            )
        self.is_whole = len(self._runs) == len(session.checkpoints)

    def gather(self, chosen: Sequence[int], columns: slice, out: Tensor) -> None:
        """Columns of these checkpoints into out [r, c]."""
        numbers, read = out.numpy(), 0
        for row, i in enumerate(chosen):
            for here, part in self._runs[i].parts(columns.start, columns.stop):
                if isinstance(part, Tensor):
                    out[row, here].copy_(part)
                else:
                    numbers[row, here] = part
                read += part.nbytes
        self._reads.add(read)


class _Runs:
    """One checkpoint: views of its files, and the columns that each fills."""

    def __init__(self, views: Sequence[tuple[int, Tensor]]) -> None:
        full = [(start, view) for start, view in views if view.numel()]
        self._starts = [start for start, _ in full]
        self._ends = [start + view.numel() for start, view in full]
        # NumPy copies with less ado; float16 and less torch widens faster
        self._views = [as_array(v) if v.dtype in BY_NUMPY else v for _, v in full]

    def parts(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor | Array]]:
        """Yield where among these columns each view begins and ends, and its part there."""
        n = bisect_right(self._ends, start)
        while n < len(self._starts) and (at := self._starts[n]) < stop:
            begin, end = max(at, start), min(self._ends[n], stop)
            yield slice(begin - start, end - start), self._views[n][begin - at : end - at]
            n += 1
