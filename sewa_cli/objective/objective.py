"""The user's loss as a function of the model's weights.

Gets callables and tensors only; what the callables are (the user's functions) is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.errors import TaskError
from sewa_cli.objective.batchnorm import batch_statistics, batchnorm_layers, tracking
from sewa_cli.objective.memo import Memo, Tensors, are_numbers, number
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.tree import (
    WALK,
    arrays,
    change,
    has_other_rows,
    has_rows,
    rows,
    take_rows,
    tensors,
    to_device,
)

Batch = Any
Data = Iterable[Batch]  # re-iterable


@dataclass
class Passes:
    """How many batches went through the model, and how many back."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class UnitLosses:
    """Losses of whole batches [b] and the rows in each [b]; of single rows [n] where they split."""

    batches: Tensor
    counts: Tensor
    rows: Tensor | None

    @property
    def mean(self) -> float:
        return float(self.batches @ self.counts / self.counts.sum())

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.batches).all())

    def tensors(self) -> Tensors:
        """For a memo."""
        found = {"batches": self.batches, "counts": self.counts}
        return found if self.rows is None else {**found, "rows": self.rows}

    @classmethod
    def fits(cls, found: Tensors) -> bool:
        batches, counts, rows = (found.get(name) for name in ("batches", "counts", "rows"))
        if batches is None or counts is None or batches.shape != counts.shape or counts.ndim != 1:
            return False
        return rows is None or rows.shape == (int(counts.sum()),)


@dataclass
class Objective:
    """The user's loss of the model's weights, on the selection data or any other."""

    model: FlatModel
    predict: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]
    backward: Callable[[Tensor], None]
    selection: Data = ()
    # while a mask is learned BatchNorm takes the batch's own statistics: running ones, averaged,
    # fit no mixture, and least of all one of checkpoints far apart, though they are recomputed for
    # the average in the end
    batch_statistics: bool = False
    passes: Passes = field(default_factory=Passes)
    memo: Memo = field(default_factory=Memo)

    offers = frozenset({"value", "gradient", "outputs"})  # what a solver may ask of it

    def value(self, flat: Tensor) -> float:
        """The selection loss at the weights `flat` [P]."""
        self.model.set(flat)
        return self.mean_loss(self.selection)[0]

    @torch.no_grad()
    def learning_value(self, flat: Tensor) -> float:
        """That with BatchNorm as a mask is learned with: on the batch's own statistics."""
        if not self.batch_statistics:
            return self.value(flat)
        self.model.set(flat)

        def work() -> Tensors:
            return {"loss": number(self._learning_value())}

        return float(self.recall("learning value", self.selection, work)["loss"])

    def _learning_value(self) -> float:
        self.model.module.eval()
        total, seen = 0.0, 0
        for batch in self.selection:
            if (n := rows(batch)) > 0:
                with self._learning(batch):
                    total += n * float(self._outputs_and_loss(batch)[1])
                seen += n
        return total / seen if seen else self._mean_loss(self.selection)[0]

    def gradient(self, flat: Tensor, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Loss at the weights `flat` [P] over `batches`, and its gradient [parameters]."""
        self.model.set(flat)
        self.model.zero_gradients()
        counts = [rows(batch) for batch in batches]
        total = torch.zeros((), device=self.model.device)
        for batch, n in zip(batches, counts, strict=True):
            with torch.enable_grad(), self._learning(batch):
                part = self._outputs_and_loss(batch)[1] * (n / sum(counts))
                self.backward(part)
            self.passes.backward += 1
            total += part.detach()
        self.model.check_untouched()
        return total, self.model.collect_gradients()

    def outputs(self, batch: Batch) -> Any:
        """What the model predicts for a batch, for a solver to learn from; one forward pass."""
        self.passes.forward += 1
        with self._learning(batch):
            return self.predict(self.model.module, to_device(batch, self.model.device))

    def batches(self) -> Iterator[Batch]:
        """Selection batches without end, on the device, starting over when they are exhausted."""
        while True:
            empty = True
            for batch in self.selection:
                if rows(batch) > 0:
                    empty = False
                    yield to_device(batch, self.model.device)
            if empty:
                raise _no_rows(self.selection)

    @torch.no_grad()
    def mean_loss(self, data: Data) -> tuple[float, int]:
        """Mean over all rows of `data` (a short last batch counts less), and the number of rows."""

        def work() -> Tensors:
            loss, rows = self._mean_loss(data)
            return {"loss": number(loss), "rows": number(rows)}

        found = self.recall("mean loss", data, work)
        return float(found["loss"]), int(found["rows"])

    def _mean_loss(self, data: Data) -> tuple[float, int]:
        total, seen = 0.0, 0
        for _, n, _, loss in self._evaluated(data):
            total += n * float(loss)
            seen += n
        return total / seen, seen

    @torch.no_grad()
    def unit_losses(self, data: Data) -> UnitLosses:
        """The loss of every row on its own; of every batch, if the loss is no mean over rows."""

        def work() -> Tensors:
            return self._unit_losses(data).tensors()

        found = self.recall("unit losses", data, work, UnitLosses.fits)
        return UnitLosses(found["batches"], found["counts"], found.get("rows"))

    def recall(
        self,
        what: str,
        data: Data,
        work: Callable[[], Tensors],
        fits: Callable[[Tensors], bool] = are_numbers,
    ) -> Tensors:
        """What was worked out before of the weights in the model; of data without a name, never."""
        name = getattr(data, "name", None)
        if name is None:
            return work()
        return self.memo.recall_all((what, name, *self.model.weights), work, fits)

    def _unit_losses(self, data: Data) -> UnitLosses:
        by_row: list[Tensor] = []
        by_batch: list[tuple[float, int]] = []
        splits = True
        for batch, n, outputs, loss in self._evaluated(data):
            by_batch.append((float(loss), n))
            if splits:
                batch = to_device(batch, self.model.device)
                found = row_losses(self.loss, outputs, batch, n)
                splits = found is not None and are_parts(found, loss.double())
                if found is not None:
                    by_row.append(found)
        values, counts = (torch.tensor(x, dtype=torch.float64) for x in zip(*by_batch, strict=True))
        return UnitLosses(values, counts, torch.cat(by_row).cpu() if splits else None)

    def _evaluated(self, data: Data) -> Iterator[tuple[Batch, int, Any, Tensor]]:
        """Batches of `data` with their rows, outputs and losses."""
        self.model.module.eval()
        empty = True
        for batch in data:
            if (n := rows(batch)) > 0:  # the mean of none is NaN
                empty = False
                yield batch, n, *self._outputs_and_loss(batch)
        if empty:
            raise _no_rows(data)
        self.model.check_untouched()

    def recompute_batchnorm(self, data: Data) -> int:
        """Running statistics of what is in the model, taken over `data`; returns its rows."""
        seen = 0
        with tracking(self.model.module) as updates, torch.no_grad():
            for batch in data:
                seen += rows(batch)
                self.passes.forward += 1
                self.predict(self.model.module, to_device(batch, self.model.device))
        if not any(updates.values()):
            raise TaskError(
                f"{_name_of(data)}(): BatchNorm statistics need batches of two rows or more"
            )
        self.model.absorb_buffers()
        return seen

    @property
    def batchnorm_layers(self) -> int:
        return len(batchnorm_layers(self.model.module))

    def _outputs_and_loss(self, batch: Batch) -> tuple[Any, Tensor]:
        """Outputs, and the mean loss over the batch, 0-d. A changed batch is an error."""
        self.passes.forward += 1
        batch = to_device(batch, self.model.device)  # its containers anew: they may be popped from
        watched = [x for x in arrays(batch) if isinstance(x, Tensor) and not x.is_inference()]
        versions = [tensor._version for tensor in watched]  # torch counts in-place changes
        outputs = self.predict(self.model.module, batch)
        loss = self.loss(outputs, batch).reshape(())
        if [tensor._version for tensor in watched] != versions:
            raise TaskError(
                "predict() or loss() changes the batch in place, so the next pass over it would "
                "see other data; work on a copy (x.clone())"
            )
        return outputs, loss

    def _learning(self, batch: Batch) -> Any:
        anew = self.batch_statistics and rows(batch) > 1  # one row has no variance
        return batch_statistics(self.model.module) if anew else nullcontext()


def _name_of(data: Data) -> str:
    return getattr(data, "name", "selection_data")


def _no_rows(data: Data) -> TaskError:
    return TaskError(f"{_name_of(data)}(): there are no batches with rows in them")


def are_parts(rows: Tensor, loss: Tensor) -> bool:
    """Whether losses of single rows make up the batch's: their mean is it, and they see the rows.

    A loss that was computed before it was split (in the model itself, say) is the same for each.
    """
    if not torch.allclose(rows.mean(), loss, rtol=1e-4, atol=1e-6, equal_nan=True):
        return False
    return len(rows) == 1 or not bool(torch.isfinite(loss)) or not bool((rows == rows[0]).all())


def row_losses(
    loss: Callable[[Any, Batch], Tensor], outputs: Any, batch: Batch, n: int
) -> Tensor | None:
    """loss(outputs, batch) of each of the n rows alone, [n] float64; None if it cannot be split."""
    if not any(has_rows(x, n) for x in tensors(outputs)):  # none of the outputs belongs to a row
        return None
    by_row = [x for x in tensors((outputs, batch)) if has_rows(x, n)]

    def one(*parts: Tensor) -> Tensor:
        left = iter(parts)
        single = change((outputs, batch), lambda x: next(left)[None] if has_rows(x, n) else WALK)
        return loss(*single).reshape(())

    # in one go where the user's loss allows it; row by row is slow, but takes any loss. Copies:
    # what one attempt has changed in place, the next would see
    if not has_other_rows((outputs, batch), n):
        with suppress(Exception):
            together: Tensor = torch.func.vmap(one)(*(x.clone() for x in by_row))
            return together.cpu().double()  # MPS has no float64
    with suppress(Exception):  # whatever the user's loss makes of a single row
        each = (take_rows((outputs, batch), n, torch.tensor([i])) for i in range(n))
        return torch.stack([loss(*row).reshape(()) for row in each]).cpu().double()
    return None
