"""Runs the model at a base and near every checkpoint, and keeps the outputs, within a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli import ranks
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.objective.classes import Targets
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.split import Sample, draw_rows
from sewa_cli.objective.tree import Nest, rows, take_rows
from sewa_cli.rng import seeded
from sewa_cli.settings import Count, Positive
from sewa_cli.solvers import Problem, Sizes, Solver
from sewa_cli.solvers.linear.digest import WORTHWHILE, Digest
from sewa_cli.solvers.linear.outputs import Outputs
from sewa_cli.solvers.linear.spread import Spread, own_columns
from sewa_cli.solvers.linear.surrogate import Size, Surrogate
from sewa_cli.solvers.linear.whole import Part, Whole, flatten, run_model, shapes_of
from sewa_cli.text import size
from sewa_cli.trajectory import Layout
from sewa_cli.trajectory.deltas import ROWS, Deltas
from sewa_cli.trajectory.dense import Dense

# float32 vectors of length O besides the cache: the base, a mixture and its copy, the gradient, a
# swap, and more than as much again inside the user's loss
SPARE = 12
# Rows without which nothing is learned, where there are more: five folds of six each. Fewer
# would choose by luck, and a share of all says nothing: a hundredth of 10⁶ rows is plenty.
FEWEST = 32
# Numbers for each checkpoint, for the sake of time: nested folds go over each a thousand times. Of
# a digest more, as its loss is in closed form and needs no call of the user's: enough for what
# `task: huggingface` reads by default, 2,000 examples of 128 tokens with 65 numbers each
MOST, MOST_DIGESTED = 1_000_000, 20_000_000
LOOKED_AT = 16  # batches whose targets are compared with the user's loss, in two rows each
CLOSE = 1e-3  # of the loss: what targets and loss may differ by


class Linearising(Solver.Settings):
    """What every solver takes that works in output space."""

    h: Annotated[Positive, Field(le=1)] = Field(
        0.1, description="how far towards each checkpoint the model is evaluated"
    )
    outputs: Count | None = Field(
        None,
        description="numbers kept for each checkpoint; more rows take long "
        "(default 1,000,000, of digests 20,000,000)",
    )
    largest: Count = Field(
        32, description="of many classes' logits, the largest are kept for each target, and"
    )
    samples: Count = Field(32, description="so many samples of the others")


@dataclass(frozen=True)
class Keep:
    """What is to be kept of the outputs; `section` of sewa.yaml says so."""

    most: int | None = None
    largest: int = 32
    samples: int = 32
    section: str = "linear"

    @classmethod
    def of(cls, settings: Linearising, section: str) -> Keep:
        return cls(settings.outputs, settings.largest, settings.samples, section)

    @property
    def each(self) -> int:
        """Numbers of a digest for each target."""
        return 1 + self.largest + self.samples

    def digests(self, classes: float) -> bool:
        """Return whether so many classes are worth a digest."""
        return classes >= WORTHWHILE * self.each

    def passes(self, sizes: Sizes) -> tuple[int, float]:
        """Return the passes to count the outputs, and to get those of one average for a cache."""
        if self.digests(sizes.classes):
            return 0, 1 + min(1.0, LOOKED_AT / sizes.batches)
        return 1, 1

    def fit(self, sizes: Sizes, held: int, extra: int = 0) -> tuple[int, float]:
        """Return the bytes of the cache next to what is held, and the share of rows in it."""
        is_digest, room = self.digests(sizes.classes), max(1, sizes.room - held)
        every = max(1, sizes.targets * self.each if is_digest else sizes.numbers)
        numbers = min(every, self.most_numbers(is_digest))
        numbers = int(numbers * min(1.0, room / least(sizes.k, numbers, extra)))
        wide = _need(sizes.k, numbers, torch.float32, extra)
        return wide if wide <= room else least(sizes.k, numbers, extra), numbers / every

    def most_numbers(self, is_digest: bool) -> int:
        return self.most or (MOST_DIGESTED if is_digest else MOST)


USUAL = Keep()


@dataclass(frozen=True)
class Rows:
    """The selection batches, and how many numbers are kept of their outputs."""

    batches: list[Nest]
    numbers: int
    targets: list[Targets] | None = None  # of each batch, if a digest of its logits is kept
    of_rows: int = 0  # that the data have

    @property
    def count(self) -> int:
        return sum(map(rows, self.batches))


def count(problem: Problem, keep: Keep) -> Rows:
    """Count all selection examples and their outputs, whatever weights are in the model."""
    objective = problem.objective
    objective.model.module.eval()
    with seeded(objective.seed):
        batches = [batch for batch in objective.selection if rows(batch) > 0]
    if not batches:
        raise TaskError("selection_data(): there are no batches with rows in them")
    return _counted(problem, batches, keep, sum(map(rows, batches)))


def _counted(
    problem: Problem, batches: list[Nest], keep: Keep, of_rows: int, digests: bool = True
) -> Rows:
    objective = problem.objective
    if digests and (targets := _digestible(objective, batches, keep)) is not None:
        numbers = sum(len(one.where) for one in targets) * keep.each
        return Rows(batches, numbers, targets, of_rows)
    told = problem.events.over("counting outputs", batches, len(batches))
    runs = (run_model(objective, batch, problem.seed) for batch in told)
    numbers = sum(len(flatten(outputs)) for outputs in runs)
    if numbers == 0 and batches:
        raise TaskError("predict() gives no floating-point tensors, so there is nothing to mix")
    return Rows(batches, numbers, None, of_rows)


def _digestible(objective: Objective, batches: Sequence[Nest], keep: Keep) -> list[Targets] | None:
    """The targets of each batch, if the task says them and the classes are many."""
    found = []
    for batch in batches:
        targets = objective.targets(batch)
        if targets is None:
            return None
        found.append(targets)
    n = next((i for i, targets in enumerate(found) if len(targets.where)), None)
    if n is None:
        return None
    row = take_rows(batches[n], rows(batches[n]), found[n].rows[:1].cpu())
    of_row = objective.targets(row)
    if of_row is None:
        return None
    _, logits = next(iter(objective.logits(row, of_row, 1)))
    return found if keep.digests(logits.shape[1]) else None


def settle(
    problem: Problem, counted: Rows, keep: Keep = USUAL, extra: int = 0
) -> tuple[Problem, Rows]:
    """Choose the examples that take part, as many as there is memory and time for.

    All that comes after sees these alone: they are the selection data of the problem returned.
    `extra`: outputs [O] that the caller will keep beside the cache.
    """
    rows = _fit(problem, counted, extra, keep)
    if rows.count < rows.of_rows:
        selection = Sample.of(rows.batches, rows.of_rows)
        problem = replace(problem, objective=replace(problem.objective, selection=selection))
    return problem, rows


def _fit(problem: Problem, all_rows: Rows, extra: int, keep: Keep) -> Rows:
    """Draw examples at random, if not all can take part, and warn of what is left out."""
    k, of_rows, room = problem.trajectory.k, all_rows.of_rows, problem.room
    digests, found, share = all_rows.targets is not None, all_rows, 1.0
    needed_rows = min(FEWEST, of_rows)

    def fewer() -> Rows:
        some = _fewer_rows(all_rows.batches, share, problem.seed)
        return _counted(problem, some, keep, of_rows, digests)

    most = keep.most_numbers(digests)
    if found.numbers > most and of_rows > FEWEST:
        share = max(most / found.numbers, FEWEST / of_rows)
        found = fewer()
    while (needed := least(k, found.numbers, extra)) > room:
        share *= room / needed  # again, if padding keeps what is left from shrinking as much
        found = fewer()
        if found.count < needed_rows:
            of_one = least(k, -(-all_rows.numbers // of_rows), extra)
            helps = "" if digests else ", say what its targets() are, if it has many classes,"
            raise ConfigError(
                f"memory: the outputs of {k} checkpoints need {size(of_one)} for each of the "
                f"{of_rows} selection rows, and {needed_rows} rows at least do not fit into the "
                f"{size(room)} there are; raise --memory{helps} or choose among fewer checkpoints"
            )
    if found.count < of_rows:
        remedies = []
        if all_rows.numbers > most:
            remedies.append(f"--set {keep.section}.outputs={all_rows.numbers}")
        if (lacking := least(k, all_rows.numbers, extra) - room) > 0:
            remedies.append(f"{size(lacking)} more --memory")
        problem.events.warn(
            f"{found.count} of the {of_rows} selection rows are used, here and in every selection "
            f"loss: outputs of more are not kept; {' and '.join(remedies)} would keep all"
        )
    return found


def frame(
    problem: Problem, kept: Rows, flat: Tensor, keep: Keep = USUAL, around: bool = False
) -> tuple[Outputs, Tensor]:
    """Return the settled examples with the model's outputs [O] at the weights `flat`.

    `around`: it will be the base of a cache.
    """
    objective, model = problem.objective, problem.objective.model
    model.set(flat)
    model.module.eval()
    if kept.targets is not None:
        _check_targets(problem, kept)
        digest = Digest(
            objective,
            kept.batches,
            kept.targets,
            keep.largest,
            keep.samples,
            problem.seed,
            kept.of_rows,
            problem.room,
        )
        digest.identity = objective.memo.digest(kept.batches, keep.largest, keep.samples)
        return digest.around(flat) if around else (digest, digest.at(flat))
    parts: list[Part] = []
    outputs: list[Tensor] = []
    for batch in problem.events.over("outputs of batches", kept.batches, len(kept.batches)):
        start = parts[-1].where.stop if parts else 0
        out = run_model(objective, batch, problem.seed)
        outputs.append(flatten(out))
        where = slice(start, start + len(outputs[-1]))
        parts.append(Part(batch, rows(batch), where, shapes_of(out)))
    found = Whole(objective, parts, problem.seed, kept.of_rows)
    found.identity = objective.memo.digest(kept.batches)
    at = torch.cat(outputs).to(model.device)
    found.join(at, problem.room // 16)
    return found, at


def _check_targets(problem: Problem, kept: Rows) -> None:
    """Raise if the targets' cross-entropies are not the user's loss, at the model's weights."""
    objective = problem.objective
    assert kept.targets is not None
    pairs = list(zip(kept.batches, kept.targets, strict=True))
    for batch, its in pairs[:: -(-len(pairs) // LOOKED_AT)]:
        if len(its.where) == 0:
            continue
        few = take_rows(batch, rows(batch), torch.tensor(sorted(set(its.rows.tolist()))[:2]))
        targets = objective.targets(few)
        assert targets is not None  # as the whole batch has them
        with torch.no_grad():
            outputs = run_model(objective, few, problem.seed)
            logits = outputs.flatten(0, -2)[targets.where].float()
            each = torch.nn.functional.cross_entropy(logits, targets.classes, reduction="none")
            ours, theirs = targets.weights @ each, objective.loss(outputs, few).reshape(()).float()
        if not torch.allclose(ours, theirs, rtol=CLOSE, atol=1e-6, equal_nan=True):
            raise TaskError(
                f"targets() and loss() differ: {float(ours):.6g} by the cross-entropy of the "
                f"targets, {float(theirs):.6g} by loss(); say in targets() what loss() is made of, "
                "with weights, or leave it out"
            )


def build(
    problem: Problem,
    base: Tensor,
    h: float,
    extra: int = 0,
    keep: Keep = USUAL,
    on_row: Callable[[int, Tensor], None] | None = None,
    framed: tuple[Outputs, Tensor] | None = None,
) -> Surrogate:
    """Run the model at the base [P], then once for each of the k checkpoints, in their order:

        y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h

    The problem's room is for the cache and what is computed from it, with `extra` more outputs [O]
    that the caller will keep. It is float32 if that fits, else bfloat16 differences from the base's
    outputs. `framed`: the examples and their outputs at the base; None: they are settled here.
    `on_row` sees each checkpoint as it is read. What the memo knows is not run.
    """
    if framed is None:
        problem, rows = settle(problem, count(problem, keep), keep, extra)
        framed = frame(problem, rows, base, keep, around=True)
    k, model = problem.trajectory.k, problem.objective.model
    outputs, at_base = framed
    model.module.eval()
    numbers, here = outputs.numbers, ranks.here()
    wide = _need(k, numbers, torch.float32, extra) <= problem.room  # of few, it is the smaller one
    dtype = torch.float32 if wide else torch.bfloat16
    own = own_columns(here, numbers, outputs.block if outputs.adds_up else 1)
    cache = torch.empty(k, own.stop - own.start, dtype=dtype, device=model.device)
    found = Size(
        numbers=numbers,
        dtype=str(dtype).removeprefix("torch."),
        bytes=_need(k, numbers, dtype, extra),
        rows=sum(outputs.counts),
        of_rows=outputs.of_rows,
    )
    frozen = ~torch.isfinite(at_base)
    origin = torch.where(frozen, 0.0, at_base)
    layout = Layout.of(own.stop - own.start)
    held = Dense(cache, layout) if wide else Deltas(origin[own], cache, layout)
    is_whole = own == slice(0, numbers)
    trajectory = held if is_whole else Spread(held, own, numbers, here)
    memo = problem.objective.memo
    around = ("near", problem.trajectory.kind, memo.digest(base), outputs.identity, h, found.dtype)
    step = torch.empty_like(base)

    def near(i: int, row: Tensor) -> Tensor:
        torch.lerp(base, row.to(base.device), h, out=step)
        model.set(step)
        y = outputs.linear_outputs().sub_(at_base).div_(h).add_(at_base)
        y.masked_fill_(frozen, 0.0)  # as it is, whatever the weights
        if not torch.isfinite(y).all():
            name = problem.name_of(i)
            raise CheckpointError(f"the outputs near {name} are NaN or Inf; leave it out")
        return (y if wide else y.sub_(origin))[own].to(dtype)

    problem.events.progress("outputs", 0, k)
    for i, row in problem.trajectory.rows():
        if on_row is not None:
            on_row(i, row)
        cache[i].copy_(memo.recall((*around, i), partial(near, i, row)))
        problem.events.progress("outputs", i + 1, k)
    model.check_untouched()
    return Surrogate(outputs, at_base, trajectory, found)


def _need(k: int, numbers: int, dtype: torch.dtype, extra: int) -> int:
    """Bytes of a cache of this precision, with what is computed beside it; of a rank's part."""
    spare = SPARE + extra + (min(k, ROWS) + 1 if dtype == torch.bfloat16 else 0)
    return numbers * (dtype.itemsize * -(-k // ranks.here().size) + 4 * spare)


def least(k: int, numbers: int, extra: int = 0) -> int:
    """Bytes of the smallest cache of so many numbers for each of k checkpoints."""
    return min(_need(k, numbers, dtype, extra) for dtype in (torch.float32, torch.bfloat16))


def _fewer_rows(batches: Sequence[Nest], share: float, seed: int) -> list[Nest]:
    """That share of all rows, drawn at random; batches without any are left out."""
    counts = [rows(batch) for batch in batches]
    drawn = draw_rows(counts, int(share * sum(counts)), seed)
    return [
        take_rows(batch, n, part.nonzero().reshape(-1))
        for batch, n, part in zip(batches, counts, drawn, strict=True)
        if part.any()
    ]
