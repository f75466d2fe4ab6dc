"""What things take here, for a forecast: timed on the run itself, or by shapes and this machine.

Measured     a checkpoint is read, a batch goes through the model and back
Reckoned     no weight is read and no batch is run: the model has shapes alone. Its arithmetic is
             counted on `meta`, and divided by the rate of a product that is timed here
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from sewa_cli.objective.classes import losses
from sewa_cli.objective.observe import Observed, observe, seconds_of
from sewa_cli.objective.tree import rows, take_rows, tensors
from sewa_cli.output.mean import thread_count
from sewa_cli.session.rows import CheckpointRows
from sewa_cli.session.session import Session
from sewa_cli.trajectory import Layout
from sewa_cli.trajectory.dense import ROWS, Dense
from sewa_cli.trajectory.streamed import Streamed

PROBE = 2**26  # bytes read from a file, or numbers of W, to learn a rate
COPIES = 3  # of the outputs, in a loss whose shapes are not known


def anonymous_bytes() -> int:
    """Of this process, but for what is mapped from files."""
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))


class Rates:
    """Seconds of each kind of work; what is not asked for is not measured."""

    how: Literal["measured", "from headers"]

    def __init__(self, session: Session) -> None:
        self.session = session
        self.objective = session.objective
        self.batch = next(batch for batch in session.objective.selection if rows(batch) > 0)
        self.rows = rows(self.batch)

    @property
    def outputs(self) -> Any:
        """Of the batch."""
        return self._predicted.result

    @cached_property
    def targets(self) -> int | None:
        """Of all selection rows; None: the task does not say."""
        total = 0
        for batch in self.objective.selection:
            if rows(batch) > 0:
                found = self.objective.targets(batch)
                if found is None:
                    return None
                total += len(found.where)
        return total

    @property
    def classes(self) -> int:
        """Of each target."""
        return (
            0
            if self.targets is None or not self.objective.classes
            else (self.objective.classes.width)
        )

    @property
    def batch_bytes(self) -> int:
        """Of tensors that a batch needs on its way to its loss."""
        return self._evaluated.bytes

    @property
    def gradient_bytes(self) -> int:
        return self._differentiated.bytes

    @cached_property
    def _predicted(self) -> Observed:
        def work() -> Any:
            with torch.no_grad():
                return self.objective.outputs(self.batch)

        self.objective.model.module.eval()
        return observe(work)

    _evaluated: Observed
    _differentiated: Observed
    row: float  # seconds of a row of data through the model, to its loss
    unit: float  # that with the loss of each row on its own
    row_back: float  # and back, besides
    first_read: float  # of a checkpoint
    read: float  # again

    @cached_property
    def hashing(self) -> float:
        """A byte."""
        data = bytes(2**22)
        return seconds_of(lambda: hashlib.sha256(data)) / len(data) / thread_count()

    def product(self, k: int, vectors: int) -> float:
        """With W [k, P] in memory, for so many samples."""
        P, device = self.objective.model.layout.size, self.session.device
        few = min(k, ROWS)
        columns = min(P, max(1, PROBE // 4 // few))
        layout = Layout({"w": slice(0, columns)}, {"w": (columns,)}, columns, columns)
        W = Dense(torch.zeros(few, columns, device=device), layout)
        a = torch.zeros(vectors, few)
        return seconds_of(lambda: W.mix(a)) * k / few * P / columns

    def streamed_product(self, k: int, vectors: int) -> float:
        """With W in files, each read on the way."""
        return k * self.read + self.product(k, vectors)


class Measured(Rates):
    how = "measured"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._source = CheckpointRows(session)
        flat, newest = self.objective.model.flat, self._source.count - 1
        self.first_read = seconds_of(lambda: self._source.fill(newest, flat), most=0.0)
        self.read = min(self.first_read, seconds_of(lambda: self._source.fill(newest, flat)))
        self.objective.model.set(flat)  # what it keeps in another dtype too

    @cached_property
    def _evaluated(self) -> Observed:  # type: ignore[override]
        return observe(lambda: self.objective.mean_loss([self.batch]))

    @cached_property
    def _differentiated(self) -> Observed:  # type: ignore[override]
        model = self.objective.model
        return observe(lambda: self.objective.gradient(model.flat, [self.batch]))

    @cached_property
    def row(self) -> float:  # type: ignore[override]
        return seconds_of(lambda: self.objective.mean_loss([self.batch])) / self.rows

    @cached_property
    def unit(self) -> float:  # type: ignore[override]
        return seconds_of(lambda: self.objective.unit_losses([self.batch])) / self.rows

    @cached_property
    def row_back(self) -> float:  # type: ignore[override]
        flat = self.objective.model.flat
        whole = seconds_of(lambda: self.objective.gradient(flat, [self.batch])) / self.rows
        return max(whole - self.row, self.row)

    def streamed_product(self, k: int, vectors: int) -> float:
        P = self.objective.model.layout.size
        few = min(k, ROWS)
        if few * P > PROBE:
            return super().streamed_product(k, vectors)
        W = Streamed(self._source, 1, list(range(few)))
        return seconds_of(lambda: W.mix(torch.zeros(vectors, few))) * k / few


class Reckoned(Rates):
    how = "from headers"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        if (classes := self.objective.classes) is None:
            return
        classes.believe(self.outputs)
        targets = self.objective.targets(self.batch)
        if targets is not None and classes.features is None:
            # some rows are run at a time: what these take is enough to know
            several = max(1, classes.at_once(classes.room) // targets.per_row)
            self.batch = take_rows(self.batch, self.rows, torch.arange(min(self.rows, several)))
            self.rows = rows(self.batch)
            del self._predicted

    @cached_property
    def _evaluated(self) -> Observed:  # type: ignore[override]
        """Its outputs, and copies of them in a loss that is not called: it may look at numbers."""
        targets = self.objective.targets(self.batch)
        if targets is not None:  # in pieces

            def work() -> None:
                for part, logits in self.objective.logits(self.batch, targets):
                    losses(logits, targets.classes[part])

            return observe(work)
        seen = self._predicted
        more = COPIES * sum(x.nbytes for x in _floats(seen.result))
        return Observed(0.0, seen.flops, seen.bytes + more, None)

    @cached_property
    def _differentiated(self) -> Observed:  # type: ignore[override]
        model = self.objective.model
        if self.targets is not None:
            return observe(lambda: self.objective.gradient(model.flat, [self.batch]))

        def work() -> None:
            model.zero_gradients()
            with torch.enable_grad():
                outputs = self.objective.outputs(self.batch)
                total = torch.stack([x.sum().float() for x in _floats(outputs)]).sum()
                torch.autograd.backward(total)

        seen = observe(work)
        more = COPIES * sum(x.nbytes for x in _floats(self.outputs))
        return Observed(0.0, seen.flops, seen.bytes + more, None)

    @cached_property
    def row(self) -> float:  # type: ignore[override]
        return self._evaluated.flops / self.rows / self._flops_a_second

    @property
    def unit(self) -> float:  # type: ignore[override]
        return self.row

    @cached_property
    def row_back(self) -> float:  # type: ignore[override]
        whole = self._differentiated.flops / self.rows / self._flops_a_second
        return max(whole - self.row, self.row)

    @cached_property
    def read(self) -> float:  # type: ignore[override]
        return self.session.newest.size * (self._file_byte + self._widened_byte)

    @property
    def first_read(self) -> float:  # type: ignore[override]
        return self.read

    @cached_property
    def _flops_a_second(self) -> float:
        """Of a product in the model's own precision."""
        side, many = 2048, 256
        dtypes = [p.dtype for p in self.objective.model.module.parameters()]
        dtype = max(dtypes, key=dtypes.count)
        left, right = (
            torch.zeros(n, side, dtype=dtype, device=self.session.device) for n in (many, side)
        )
        return 2 * many * side * side / seconds_of(lambda: left @ right)

    @cached_property
    def _file_byte(self) -> float:
        """Seconds to read a byte of the oldest checkpoint: the last that the system would keep."""
        largest = max(self.session.checkpoints[0].files, key=lambda path: path.stat().st_size)
        size = largest.stat().st_size
        few = min(size, PROBE // 4)

        def work() -> None:
            with largest.open("rb", buffering=0) as file:
                with suppress(AttributeError):  # macOS has no such call
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no more than that
                file.seek((size - few) // 2)
                file.read(few)

        return seconds_of(work, most=0.0) / max(few, 1)

    @cached_property
    def _widened_byte(self) -> float:
        """Seconds to bring a byte of bfloat16 to float32."""
        narrow = torch.zeros(PROBE // 16, dtype=torch.bfloat16)
        wide = torch.empty(PROBE // 16)
        return seconds_of(lambda: wide.copy_(narrow)) / narrow.nbytes


def _floats(outputs: Any) -> list[Tensor]:
    return [x for x in tensors(outputs) if x.is_floating_point()]
