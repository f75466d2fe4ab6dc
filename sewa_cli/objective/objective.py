"""The user's loss as a function of the model's weights.

Gets callables and tensors only; what the callables are (the user's functions) is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.errors import TaskError
from sewa_cli.events import Events
from sewa_cli.objective.batchnorm import batch_statistics, tracking
from sewa_cli.objective.classes import PIECE, Classes, Stretch, Targets, losses
from sewa_cli.objective.memo import Key, Memo, Tensors
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.shares import Shares
from sewa_cli.objective.tree import rows, to_device, unchanged
from sewa_cli.objective.units import (
    Label,
    UnitLosses,
    are_parts,
    count_groups,
    labels_of,
    number,
    number_groups,
    row_losses,
)
from sewa_cli.rng import seed_of, seeded

Batch = Any
Data = Iterable[Batch]  # re-iterable


@dataclass
class Passes:
    """How many batches went through the model, and how many back."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class _Evaluated:
    """A batch: its rows, its loss 0-d, that of each row, what was seen, and labels of groups."""

    n: int
    loss: Tensor
    rows: Tensor | None
    seen: tuple[Tensor, ...]
    groups: Sequence[Hashable] = ()


@dataclass
class Objective:
    """The user's loss of the model's weights, on the selection data or any other.

    classes    what the task says about its cross-entropies, so that logits can be made in pieces
    observe    (outputs, batch) ↦ numbers to keep of a batch whose classes are not known
    summarize  what was kept of all batches (losses and hits of the targets; else what was
               observed) ↦ metrics
    seed       a loader that draws examples draws the same ones in each pass over the data
    label_groups  batch ↦ the label of each example's group; None: each stands for itself
    """

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
    classes: Classes | None = None
    observe: Callable[[Any, Batch], Tensor] | None = None
    summarize: Callable[..., Mapping[str, float]] | None = None
    label_groups: Label | None = None
    seed: int = 0
    shares: Shares | None = None  # of several ranks, how each batch is shared out
    memo: Memo | None = None
    events: Events = field(default_factory=Events, repr=False)
    known_rows: dict[str, int] = field(default_factory=dict, repr=False)  # of what was gone through

    has_loss: bool = True  # without one only weights can be set, and a metric taken of them

    def value(self, flat: Tensor) -> float:
        """Return the selection loss at the weights `flat` [P], for solvers of the user's own."""
        self.model.set(flat)
        return self.mean_loss(self.selection)[0]

    def learning_losses(self, flat: Tensor) -> UnitLosses:
        """Return selection losses with BatchNorm on the batch's own statistics, as for learning."""
        self.model.set(flat)
        return self.unit_losses(self.selection, learning=True)

    def gradient(self, flat: Tensor, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Loss at the weights `flat` [P] over `batches`, and its gradient [parameters]."""
        self.model.set(flat)
        self.model.zero_gradients()
        counts = [rows(batch) for batch in batches]
        total = torch.zeros((), device=self.model.device)
        for batch, n in zip(batches, counts, strict=True):
            targets = self.targets(batch)
            with torch.enable_grad(), self._learning(batch):
                total += self._back(batch, targets, n / sum(counts))
            self.passes.backward += 1
        self.model.check_untouched()
        return self.model.ranks.gather_rows(total)[0], self.model.collect_gradients()

    def _back(self, batch: Batch, targets: Targets | None, share: float) -> Tensor:
        """Back-propagates the batch's loss, times its share, and gives it; 0-d.

        By pieces: each back to the inputs of the head, then all of these at once to the weights.
        """
        if targets is None:
            loss = self._outputs_and_loss(batch)[1] * share
            factor = self._factor(batch)
            self.backward(loss if factor == 1 else factor * loss)
            return loss.detach()
        total = torch.zeros((), device=self.model.device)
        whole, factor = self._is_anew(batch), self._factor(batch)
        own, targets = (batch, targets) if whole else self._own_targets(batch, targets)
        for stretch, size in self._stretches(own, targets, whole):
            if not stretch.inputs.requires_grad:
                raise TaskError(
                    "predict() has no gradient; remove .detach(), .item(), no_grad or argmax"
                )
            # one tensor for all: small ones that stay would be strewn among the large that go, and
            # keep their memory from being used again
            gradient = torch.empty_like(stretch.inputs, requires_grad=False)
            for part, some in stretch.pieces(size):
                leaf = some.detach().requires_grad_(True)
                each, _ = losses(stretch.head(leaf).float(), targets.classes[part])
                loss = targets.weights[part] @ each * share
                self.backward(loss if factor == 1 else factor * loss)
                assert leaf.grad is not None
                start = part.start - stretch.part.start
                gradient[start : start + len(some)] = leaf.grad
                total += loss.detach()
            if len(gradient) or self.shares is not None:  # all ranks go back, or none
                self.backward((stretch.inputs * gradient).sum())
        return total if factor == 1 else self.model.ranks.sum(total)

    def _factor(self, batch: Batch) -> float:
        return 1.0 if self.shares is None else self.shares.factor(batch, self._is_anew(batch))

    def outputs(self, batch: Batch) -> Any:
        """Predict a batch, for a solver to learn from; one forward pass."""
        self.passes.forward += 1
        with self._learning(batch):
            return self._predict(to_device(batch, self.model.device))

    def _predict(self, batch: Batch) -> Any:
        """Predict a whole batch on the device; each of several ranks runs some of its rows."""

        if self.shares is None or self._is_anew(batch):
            return self.predict(self.model.module, batch)
        return self.shares.predict(lambda some: self.predict(self.model.module, some), batch)

    def _own_targets(self, batch: Batch, targets: Targets) -> tuple[Batch, Targets]:
        """Return this rank's rows of the batch, where they can be run apart."""
        if self.shares is None:
            return batch, targets
        on_device = to_device(batch, self.model.device)
        self.shares.look(lambda some: self.predict(self.model.module, some), on_device)
        return self.shares.own_targets(batch, targets)

    def targets(self, batch: Batch) -> Targets | None:
        """The classes whose cross-entropies are the loss; None: the task does not say."""
        if self.classes is None:
            return None
        return self.classes.targets(self.model.module, to_device(batch, self.model.device))

    @torch.no_grad()
    def logits(
        self, batch: Batch, targets: Targets, bytes_at_once: int = PIECE
    ) -> Iterator[tuple[slice, Tensor]]:
        """Logits at the targets, float32 [p, V], in pieces in order; one forward pass.

        For a solver to learn from, as `outputs`. Of several ranks, each has those of its `owners`.
        """
        with self._learning(batch):
            whole = self._is_anew(batch)
            own, mine = (batch, targets) if whole else self._own_targets(batch, targets)
            first = 0
            if mine is not targets:
                own_rank = self.owners(batch, targets) == self.model.ranks.rank
                first = int(own_rank.int().argmax())
            for stretch, size in self._stretches(own, mine, whole, bytes_at_once):
                for part, some in stretch.pieces(size):
                    here = slice(part.start + first, part.stop + first)
                    yield here, stretch.head(some).float()

    def owners(self, batch: Batch, targets: Targets) -> Tensor:
        """Which rank runs each target [t]; -1: all of them do."""
        if self.shares is None:
            return torch.full((len(targets.where),), -1)
        self._own_targets(batch, targets)
        return self.shares.owners(batch, targets, self._is_anew(batch))

    def _stretches(
        self, batch: Batch, targets: Targets, whole: bool, memory_left: int = PIECE
    ) -> Iterator[tuple[Stretch, int]]:
        """One forward pass; each stretch with how many of its targets are a piece."""
        assert self.classes is not None
        self.passes.forward += 1
        memory_left = min(memory_left, self.classes.memory_left)
        module, batch = self.model.module, to_device(batch, self.model.device)
        size = self.classes.at_once(memory_left)
        for stretch in self.classes.stretches(module, batch, targets, memory_left, whole):
            yield stretch, size

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

        if self.memo is None:
            return self._mean_loss(data)

        def work() -> Tensors:
            loss, rows = self._mean_loss(data)
            return {"loss": number(loss), "rows": number(rows)}

        found = self.recall_on(data, "mean loss", work)
        return float(found["loss"]), int(found["rows"])

    def _mean_loss(self, data: Data) -> tuple[float, int]:
        total, seen = 0.0, 0
        with seeded(self.seed):
            for found in self._evaluated(data):
                total += found.n * float(found.loss)
                seen += found.n
        return self.model.ranks.same((total / seen, seen))

    @torch.no_grad()
    def unit_losses(self, data: Data, learning: bool = False) -> UnitLosses:
        """The loss of every row on its own; of every batch, if the loss is no mean over rows.

        From the same pass the task's metrics, if it can sum them up.
        """
        if self.memo is None:
            return self._unit_losses(data, learning)
        what = "learning losses" if learning else "unit losses"
        work = partial(self._unit_losses, data, learning)
        return UnitLosses.of(self.recall_on(data, what, lambda: work().tensors()))

    def recall(self, key: Key, work: Callable[[], Tensors], draw: int | None = None) -> Tensors:
        """Return what `work` gives, or gave under this key before: then on the processor.

        `draw`: random numbers that it draws depend on the seed and on this alone. So it leaves no
        trace in those of others, whether it is called or not. None: it seeds what it draws itself.
        """
        found = None if self.memo is None else self.memo.known(key)
        if found is None:
            with nullcontext() if draw is None else seeded(seed_of(self.seed, draw)):
                found = work()
            if self.memo is not None:
                self.memo.keep(key, found)
        return found

    def recall_on(self, data: Data, what: str, work: Callable[[], Tensors]) -> Tensors:
        """Recall what was worked out of the weights in the model, on data that have a name."""
        name = getattr(data, "name", None)
        if name is None or self.memo is None:
            return work()
        return self.recall((what, name, *self.model.weights), work)

    def _unit_losses(self, data: Data, learning: bool) -> UnitLosses:
        by_row: list[Tensor] = []
        by_batch: list[tuple[float, int]] = []
        seen: list[tuple[Tensor, ...]] = []
        labels: list[Hashable] = []
        splits = True
        with seeded(self.seed):
            for found in self._evaluated(data, by_row=True, learning=learning):
                labels += found.groups
                by_batch.append((float(found.loss), found.n))
                splits = splits and found.rows is not None
                if found.rows is not None:
                    by_row.append(found.rows)
                seen.append(found.seen)
        values, counts = (torch.tensor(x, dtype=torch.float64) for x in zip(*by_batch, strict=True))
        metrics = None
        if self.summarize is not None and not learning:
            metrics = self.summarize(*(torch.cat(each) for each in zip(*seen, strict=True)))
        every = torch.cat(by_row).cpu() if splits else None
        groups = None if self.label_groups is None else number_groups(labels)
        return self.model.ranks.same(UnitLosses(values, counts, every, metrics, groups))

    def count_groups(self, data: Data) -> int | None:
        """Return how many groups the examples are of; None: each stands for itself."""
        if self.label_groups is None:
            return None
        return count_groups(number_groups(x for b in data for x in labels_of(b, self.label_groups)))

    def _evaluated(
        self, data: Data, by_row: bool = False, learning: bool = False
    ) -> Iterator[_Evaluated]:
        """The batches of `data`; `by_row`: with losses of rows, until a batch has none."""
        self.model.module.eval()
        empty = True
        for batch in self._through(data):
            if rows(batch) > 0:  # the mean of none is NaN
                empty = False
                targets = None if self.classes is None else self.targets(batch)
                with self._learning(batch) if learning else nullcontext():
                    if targets is not None:
                        found = self._at_targets(batch, targets, learning and self._is_anew(batch))
                    else:
                        found = self._by_loss(batch, by_row)
                by_row = by_row and found.rows is not None
                if self.label_groups is not None:
                    found = replace(found, groups=labels_of(batch, self.label_groups))
                yield found
        if empty:
            raise _no_rows(data)
        self.model.check_untouched()

    def _at_targets(self, batch: Batch, targets: Targets, whole: bool) -> _Evaluated:
        own, mine = (batch, targets) if whole else self._own_targets(batch, targets)
        each = torch.empty(len(mine.where), device=self.model.device)
        right = torch.empty(len(mine.where), dtype=torch.bool, device=self.model.device)
        for stretch, size in self._stretches(own, mine, whole):
            for part, some in stretch.pieces(size):
                logits = stretch.head(some).float()
                each[part], right[part] = losses(logits, mine.classes[part])
        if self.shares is not None and not whole:
            each, right = (self.shares.gather_targets(x, batch, targets) for x in (each, right))
        n, (each, right) = targets.shape[0], (each.cpu(), right.cpu())
        shares = (targets.weights.cpu() * each).double()
        by_row = n * shares.new_zeros(n).index_add_(0, targets.rows.cpu(), shares)
        return _Evaluated(n, shares.sum(), by_row, (each, right))

    def _by_loss(self, batch: Batch, by_row: bool) -> _Evaluated:
        n, (outputs, loss) = rows(batch), self._outputs_and_loss(batch)
        batch = to_device(batch, self.model.device)
        seen = () if self.observe is None else (self.observe(outputs, batch).cpu(),)
        found = row_losses(self.loss, outputs, batch, n) if by_row else None
        splits = found is not None and are_parts(found, loss.double())
        total = float(loss)
        if (
            found is not None
            and n > 1
            and abs(float(found.sum()) - total) <= 1e-4 * abs(total) != 0
        ):
            self.events.warn(
                "loss() looks like a sum over the batch's examples; return their mean, or the "
                "examples cannot be told apart"
            )
        return _Evaluated(n, loss, found if splits else None, seen)

    def recompute_batchnorm(self, data: Data) -> int:
        """Running statistics of what is in the model, taken over `data`; returns its rows."""
        seen = 0
        with seeded(self.seed), tracking(self.model.module) as updates, torch.no_grad():
            for batch in self._through(data, "BatchNorm on"):
                seen += rows(batch)
                self.passes.forward += 1
                self.predict(self.model.module, to_device(batch, self.model.device))
        if not any(updates.values()):
            raise TaskError(
                f"{_name_of(data)}(): BatchNorm statistics need batches of two examples or more"
            )
        self.model.absorb_buffers()
        return seen

    def _through(self, data: Data, doing: str = "evaluating") -> Iterator[Batch]:
        """The batches, and progress by rows; how many there are is known when all were seen."""
        name = _name_of(data).replace("_data", " examples")
        seen = 0
        told = self.events.over(
            f"{doing} {name}", data, self.known_rows.get(name, 0), lambda batch: max(0, rows(batch))
        )
        for batch in told if self.shares is None else self.shares.checked(data, told):
            yield batch
            seen += max(0, rows(batch))
        self.known_rows[name] = seen

    def _outputs_and_loss(self, batch: Batch) -> tuple[Any, Tensor]:
        """Outputs, and the mean loss over the batch, 0-d. A changed batch is an error."""
        self.passes.forward += 1
        batch = to_device(batch, self.model.device)  # its containers anew: they may be popped from
        with unchanged(batch):
            outputs = self._predict(batch)
            return outputs, self.loss(outputs, batch).reshape(())

    def _is_anew(self, batch: Batch) -> bool:
        """Whether BatchNorm takes the batch's own statistics: of one row there are none."""
        return self.batch_statistics and rows(batch) > 1

    def _learning(self, batch: Batch) -> Any:
        if not self.batch_statistics or not self._is_anew(batch):
            return nullcontext()
        return batch_statistics(self.model.module)


def _name_of(data: Data) -> str:
    return getattr(data, "name", "selection_data")


def _no_rows(data: Data) -> TaskError:
    return TaskError(f"{_name_of(data)}() gives no examples; return one batch or more")
