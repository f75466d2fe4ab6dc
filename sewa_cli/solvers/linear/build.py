"""Runs the model at a base and near every checkpoint, and keeps the outputs, within a cap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.split import draw_rows
from sewa_cli.objective.tree import Nest, rows, take_rows
from sewa_cli.solvers.linear.surrogate import (
    Part,
    Size,
    Surrogate,
    flatten,
    run_model,
    shapes_of,
)
from sewa_cli.text import size
from sewa_cli.trajectory import Layout, Trajectory
from sewa_cli.trajectory.deltas import Deltas, rows_at_once
from sewa_cli.trajectory.dense import Dense

# float32 vectors of length O besides the cache: the base, a mixture and its copy, the gradient, a
# swap, and more than as much again inside the user's loss
SPARE = 12


FEWEST = 32  # rows that are kept however many numbers they have


def build(
    objective: Objective,
    base: Tensor,
    k: int,
    checkpoints: Callable[[], Iterable[tuple[int, Tensor]]],
    h: float,
    room: int,
    seed: int = 0,
    on_checkpoint: Callable[[int], None] | None = None,
    extra: int = 0,
    most: int | None = None,
) -> Surrogate:
    """Run the model at the base [P], then once for each of the k checkpoints, in their order.

    `room`: bytes for the cache and what is computed from it, with `extra` more outputs [O] that the
    caller will keep. It is float32 if that fits, else bfloat16 differences from the base's outputs,
    else fewer rows of the data. `most`: numbers to keep for each checkpoint, for the sake of time;
    FEWEST rows are kept whatever they are.
    """
    model = objective.model
    model.module.eval()
    batches = [batch for batch in objective.selection if rows(batch) > 0]
    if not batches:
        raise TaskError("selection_data(): there are no batches with rows in them")
    of_rows = sum(rows(batch) for batch in batches)
    model.set(base)
    numbers = _count_outputs(objective, batches, seed)
    if numbers == 0:
        raise TaskError("predict() gives no floating-point tensors, so there is nothing to mix")
    every, share = batches, 1.0
    if most is not None and numbers > most and of_rows > FEWEST:
        share = max(most / numbers, FEWEST / of_rows)
        batches = _fewer_rows(every, share, seed)
        numbers = _count_outputs(objective, batches, seed)
    while (needed := least(k, numbers, extra)) > room:
        share *= room / needed  # again, if padding keeps what is left from shrinking as much
        batches = _fewer_rows(every, share, seed)
        if not batches:
            raise ConfigError(
                f"memory: the outputs of {k} checkpoints, even on one of {of_rows} rows, need more "
                f"than the {size(room)} there are; raise --memory"
            )
        numbers = _count_outputs(objective, batches, seed)
    at_base = torch.empty(numbers, dtype=torch.float32, device=model.device)
    parts: list[Part] = []
    for batch in batches:
        start = parts[-1].where.stop if parts else 0
        out = run_model(objective, batch, seed)
        flat = flatten(out)
        where = slice(start, start + len(flat))
        at_base[where] = flat
        parts.append(Part(batch, rows(batch), where, shapes_of(out)))
    wide = _need(k, numbers, torch.float32, extra) <= room  # of few, it is the smaller one
    dtype = torch.float32 if wide else torch.bfloat16
    cache = torch.empty(k, numbers, dtype=dtype, device=model.device)
    _fill(cache, objective, parts, base, at_base, checkpoints, h, seed, on_checkpoint)
    model.check_untouched()
    found = Size(
        numbers=numbers,
        dtype=str(dtype).removeprefix("torch."),
        bytes=_need(k, numbers, dtype, extra),
        rows=sum(part.n for part in parts),
        of_rows=of_rows,
    )
    return Surrogate(objective, parts, at_base, _as_trajectory(cache, at_base), found, seed)


def _as_trajectory(cache: Tensor, at_base: Tensor) -> Trajectory:
    O = len(at_base)  # noqa: E741 - the letter of the formulas
    layout = Layout({"outputs": slice(0, O)}, {"outputs": (O,)}, O, O)
    if cache.dtype == torch.float32:
        return Dense(cache, layout)
    return Deltas(torch.where(torch.isfinite(at_base), at_base, 0.0), cache, layout)


def _fill(
    cache: Tensor,
    objective: Objective,
    parts: Sequence[Part],
    base: Tensor,
    at_base: Tensor,
    checkpoints: Callable[[], Iterable[tuple[int, Tensor]]],
    h: float,
    seed: int,
    on_checkpoint: Callable[[int], None] | None,
) -> None:
    """y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h into row i; of narrow rows, less f(b)."""
    step, reached = torch.empty_like(base), torch.empty_like(at_base)
    frozen = ~torch.isfinite(at_base)
    any_frozen = bool(frozen.any())
    origin = torch.where(frozen, 0.0, at_base) if cache.dtype != torch.float32 else None
    for i, row in checkpoints():
        torch.lerp(base, row.to(base.device), h, out=step)
        objective.model.set(step)
        for part in parts:
            moved = flatten(run_model(objective, part.batch, seed))
            if len(moved) != part.where.stop - part.where.start:
                raise TaskError("predict() gives outputs whose size depends on the weights")
            reached[part.where] = moved
        reached.sub_(at_base).div_(h).add_(at_base)
        if any_frozen:
            reached[frozen] = 0.0  # as it is, whatever the weights
        if not torch.isfinite(reached).all():
            raise CheckpointError(f"the outputs near checkpoint {i} are NaN or Inf; leave it out")
        cache[i].copy_(reached if origin is None else reached.sub_(origin))
        if on_checkpoint is not None:
            on_checkpoint(i)


def _need(k: int, numbers: int, dtype: torch.dtype, extra: int) -> int:
    """Bytes of a cache of this precision, with what is computed beside it."""
    spare = SPARE + extra + (rows_at_once(k) + 1 if dtype == torch.bfloat16 else 0)
    return numbers * (dtype.itemsize * k + 4 * spare)


def least(k: int, numbers: int, extra: int = 0) -> int:
    """Bytes of the smallest cache of so many numbers for each of k checkpoints."""
    return min(_need(k, numbers, dtype, extra) for dtype in (torch.float32, torch.bfloat16))


def usual(k: int, numbers: int, room: int, extra: int = 0) -> int:
    """Bytes of the cache that is made: in float32 where that fits; all the room where none does."""
    wide = _need(k, numbers, torch.float32, extra)
    return wide if wide <= room else min(least(k, numbers, extra), room)


def _count_outputs(objective: Objective, batches: Sequence[Nest], seed: int) -> int:
    return sum(len(flatten(run_model(objective, batch, seed))) for batch in batches)


def _fewer_rows(batches: Sequence[Nest], share: float, seed: int) -> list[Nest]:
    """That share of all rows, drawn at random; batches without any are left out."""
    counts = [rows(batch) for batch in batches]
    drawn = draw_rows(counts, int(share * sum(counts)), seed)
    return [
        take_rows(batch, n, part.nonzero().reshape(-1))
        for batch, n, part in zip(batches, counts, drawn, strict=True)
        if part.any()
    ]
