"""The checkpoints as rows of W, whole or in columns, straight from their files."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sewa_cli.dtypes import Array
from sewa_cli.errors import CheckpointError
from sewa_cli.report.shared import LeftOut
from sewa_cli.trajectory import fill_row

if TYPE_CHECKING:
    from sewa_cli.session.session import Session

WIDE = (torch.float32, torch.float64)


class CheckpointRows:
    """The session's checkpoints as rows of W; one with NaN or Inf is left out, or stops the run."""

    def __init__(self, session: Session) -> None:
        self.layout = session.model.layout
        self.device = session.device
        self.count = len(session.checkpoints)
        self._session = session
        self._broken: dict[int, str | None] = {}  # of those that were read: what is wrong with them
        self._mapped: _Mapped | None = None

    @property
    def left_out(self) -> list[LeftOut]:
        return [
            LeftOut(path=str(c.path), step=c.step, reason=f"{self._broken[i]} holds NaN or Inf")
            for i, c in enumerate(self._session.checkpoints)
            if self._broken.get(i) is not None
        ]

    @property
    def gather(self) -> Callable[[Sequence[int], slice, Tensor], None] | None:
        """Where every checkpoint can be mapped; they stay so, and no thread has to open any."""
        if self._mapped is None:
            self._mapped = _Mapped(self._session)
        if not self._mapped.is_whole:
            return None
        for checkpoint in self._session.checkpoints:
            checkpoint.check_unchanged()
        return self._mapped.gather

    def fill(self, i: int, row: Tensor) -> bool:
        session, checkpoint = self._session, self._session.checkpoints[i]
        is_new = i not in self._broken
        if not is_new:  # looked through already; now it must only be the same
            checkpoint.check_unchanged()
        broken = fill_row(row, session.floats(checkpoint), self.layout, check=is_new)
        checkpoint.close()
        if not is_new:
            return self._broken[i] is None
        self._broken[i] = broken
        session.events.progress("reading", len(self._broken), self.count)
        if broken is not None:
            reason = f"{broken} holds NaN or Inf"
            if session.config.nonfinite == "error":
                raise CheckpointError(
                    f"{checkpoint.path}: {reason}; --nonfinite skip leaves it out"
                )
            session.events.warn(f"{checkpoint.path}: left out: {reason}")
            if len(self.left_out) == self.count:
                raise CheckpointError(f"all {self.count} checkpoints hold NaN or Inf; none is left")
        return broken is None


class _Mapped:
    """Columns of W straight from the mapped files, widened to float32 on the way."""

    def __init__(self, session: Session) -> None:
        model, checkpoints = session.model, session.checkpoints
        layout = model.layout
        sources = {model.canonical(name): source for name, source in session.names.items()}
        ordered = sorted(layout.slices, key=lambda name: layout.slices[name].start)
        self._ends = [layout.slices[name].stop for name in ordered]
        self._starts = [layout.slices[name].start for name in ordered]
        self._reads = session.reads
        self._views: list[list[Tensor | Array]] = []
        self.is_whole = all(checkpoint.mapped for checkpoint in checkpoints)
        for checkpoint in checkpoints if self.is_whole else ():
            views = [checkpoint.view(sources[name]) for name in ordered]
            checkpoint.close()  # what is mapped stays so, without a descriptor
            self.is_whole = self.is_whole and all(view.is_contiguous() for view in views)
            # NumPy copies with less ado; of 16 bits torch widens faster
            self._views.append(
                [v.numpy().reshape(-1) if v.dtype in WIDE else v.reshape(-1) for v in views]
            )

    def gather(self, chosen: Sequence[int], columns: slice, out: Tensor) -> None:
        """Columns of these checkpoints into out [r, c]."""
        first = bisect_right(self._ends, columns.start)
        last = bisect_left(self._starts, columns.stop)
        numbers = out.numpy()
        for tensor in range(first, last):
            start, stop = self._starts[tensor], self._ends[tensor]
            begin, end = max(start, columns.start), min(stop, columns.stop)
            there = slice(begin - start, end - start)
            here = slice(begin - columns.start, end - columns.start)
            for place, i in enumerate(chosen):
                part = self._views[i][tensor][there]
                if isinstance(part, Tensor):
                    out[place, here].copy_(part)
                else:
                    numbers[place, here] = part
            size = sum(self._views[i][tensor].itemsize for i in chosen)
            self._reads.add((end - begin) * size)
