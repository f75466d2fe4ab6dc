"""Runs the model at a base and near every checkpoint, and keeps the outputs, within a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.objective.split import draw_rows
from sewa_cli.objective.tree import Nest, rows, take_rows
from sewa_cli.solvers import Problem
from sewa_cli.solvers.linear.outputs import Outputs, Part, flatten, run_model, shapes_of
from sewa_cli.solvers.linear.surrogate import Size, Surrogate
from sewa_cli.text import size
from sewa_cli.trajectory import Layout
from sewa_cli.trajectory.deltas import ROWS, Deltas
from sewa_cli.trajectory.dense import Dense

# float32 vectors of length O besides the cache: the base, a mixture and its copy, the gradient, a
# swap, and more than as much again inside the user's loss
SPARE = 12
FEWEST = 32  # rows that are kept however many numbers they have


def frame(
    problem: Problem,
    flat: Tensor,
    extra: int = 0,
    most: int | None = None,
    section: str = "linear",
) -> tuple[Outputs, Tensor]:
    """The rows whose outputs fit into the problem's room, and the model's outputs [O] at `flat`.

    `extra`: outputs [O] that the caller will keep beside the cache. `most`: numbers to keep for
    each checkpoint, for the sake of time; FEWEST rows are kept whatever they are. `section` of
    sewa.yaml has it.
    """
    objective = problem.objective
    model = objective.model
    model.module.eval()
    batches = [batch for batch in objective.selection if rows(batch) > 0]
    if not batches:
        raise TaskError("selection_data(): there are no batches with rows in them")
    model.set(flat)
    parts: list[Part] = []
    outputs: list[Tensor] = []
    for batch in _that_fit(problem, batches, extra, most):
        start = parts[-1].where.stop if parts else 0
        out = run_model(objective, batch, problem.seed)
        outputs.append(flatten(out))
        where = slice(start, start + len(outputs[-1]))
        parts.append(Part(batch, rows(batch), where, shapes_of(out)))
    found = Outputs(objective, parts, problem.seed, sum(map(rows, batches)))
    found.identity = objective.memo.digest([part.batch for part in parts])
    if (kept := sum(found.counts)) < found.of_rows:
        tight = 2 * least(problem.trajectory.k, found.numbers, extra) > problem.room
        problem.events.warn(
            f"outputs of {kept} of the {found.of_rows} selection rows fit into "
            f"{'--memory' if tight else f'{section}.outputs'}; the choice is made on those"
        )
    at = torch.cat(outputs).to(model.device)
    found.join(at, problem.room // 16)
    return found, at


def build(
    problem: Problem,
    base: Tensor,
    h: float,
    extra: int = 0,
    most: int | None = None,
    on_row: Callable[[int, Tensor], None] | None = None,
    framed: Outputs | None = None,
) -> Surrogate:
    """Run the model at the base [P], then once for each of the k checkpoints, in their order:

        y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h

    The problem's room is for the cache and what is computed from it, with `extra` more outputs [O]
    that the caller will keep. It is float32 if that fits, else bfloat16 differences from the base's
    outputs, else fewer rows of the data (`framed`, or as `frame` finds them). `on_row` sees each
    checkpoint as it is read. What the problem's memo knows is not run, nor read if nobody looks.
    """
    k, model = problem.trajectory.k, problem.objective.model
    if framed is None:
        framed, at_base = frame(problem, base, extra, most)
    else:
        model.module.eval()
        at_base = framed.at(base)
    numbers = framed.numbers
    wide = _need(k, numbers, torch.float32, extra) <= problem.room  # of few, it is the smaller one
    dtype = torch.float32 if wide else torch.bfloat16
    cache = torch.empty(k, numbers, dtype=dtype, device=model.device)
    found = Size(
        numbers=numbers,
        dtype=str(dtype).removeprefix("torch."),
        bytes=_need(k, numbers, dtype, extra),
        rows=sum(framed.counts),
        of_rows=framed.of_rows,
    )
    frozen = ~torch.isfinite(at_base)
    origin = torch.where(frozen, 0.0, at_base)
    layout = Layout({"outputs": slice(0, numbers)}, {"outputs": (numbers,)}, numbers, numbers)
    trajectory = Dense(cache, layout) if wide else Deltas(origin, cache, layout)
    surrogate = Surrogate(framed, at_base, trajectory, found)
    memo = problem.memo
    around = ("near", memo.digest(base), framed.identity, h, found.dtype)
    missing = []
    for i in range(k):
        if (known := memo.known((*around, i), (numbers,), dtype)) is None:
            missing.append(i)
        else:
            cache[i].copy_(known)
    step = torch.empty_like(base)
    first = (missing or [k])[0] if on_row is None else 0
    for i, row in problem.trajectory.rows(first):
        if on_row is not None:
            on_row(i, row)
        if i not in missing:
            continue
        torch.lerp(base, row.to(base.device), h, out=step)
        model.set(step)
        y = surrogate.run().sub_(at_base).div_(h).add_(at_base)
        y.masked_fill_(frozen, 0.0)  # as it is, whatever the weights
        if not torch.isfinite(y).all():
            raise CheckpointError(f"the outputs near checkpoint {i} are NaN or Inf; leave it out")
        cache[i].copy_(y if wide else y.sub_(origin))
        memo.keep((*around, i), cache[i])
        problem.events.progress("surveying", i + 1, k)
    model.check_untouched()
    return surrogate


def _that_fit(problem: Problem, batches: list[Nest], extra: int, most: int | None) -> list[Nest]:
    """As many rows of the batches as there is room for, drawn at random."""
    k, of_rows = problem.trajectory.k, sum(rows(batch) for batch in batches)

    def count(some: Sequence[Nest]) -> int:
        """The numbers in their outputs."""
        runs = (run_model(problem.objective, batch, problem.seed) for batch in some)
        return sum(len(flatten(outputs)) for outputs in runs)

    numbers = count(batches)
    if numbers == 0:
        raise TaskError("predict() gives no floating-point tensors, so there is nothing to mix")
    found, share = batches, 1.0
    if most is not None and numbers > most and of_rows > FEWEST:
        share = max(most / numbers, FEWEST / of_rows)
        found = _fewer_rows(batches, share, problem.seed)
        numbers = count(found)
    while (needed := least(k, numbers, extra)) > problem.room:
        share *= (
            problem.room / needed
        )  # again, if padding keeps what is left from shrinking as much
        found = _fewer_rows(batches, share, problem.seed)
        if not found:
            raise ConfigError(
                f"memory: the outputs of {k} checkpoints, even on one of {of_rows} rows, need more "
                f"than the {size(problem.room)} there are; raise --memory"
            )
        numbers = count(found)
    return found


def _need(k: int, numbers: int, dtype: torch.dtype, extra: int) -> int:
    """Bytes of a cache of this precision, with what is computed beside it."""
    spare = SPARE + extra + (min(k, ROWS) + 1 if dtype == torch.bfloat16 else 0)
    return numbers * (dtype.itemsize * k + 4 * spare)


def least(k: int, numbers: int, extra: int = 0) -> int:
    """Bytes of the smallest cache of so many numbers for each of k checkpoints."""
    return min(_need(k, numbers, dtype, extra) for dtype in (torch.float32, torch.bfloat16))


def usual(k: int, numbers: int, room: int, extra: int = 0) -> int:
    """Bytes of the cache that is made: in float32 where that fits; all the room where none does."""
    wide = _need(k, numbers, torch.float32, extra)
    return wide if wide <= room else min(least(k, numbers, extra), room)


def _fewer_rows(batches: Sequence[Nest], share: float, seed: int) -> list[Nest]:
    """That share of all rows, drawn at random; batches without any are left out."""
    counts = [rows(batch) for batch in batches]
    drawn = draw_rows(counts, int(share * sum(counts)), seed)
    return [
        take_rows(batch, n, part.nonzero().reshape(-1))
        for batch, n, part in zip(batches, counts, drawn, strict=True)
        if part.any()
    ]
