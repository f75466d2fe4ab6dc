"""Runs the model at a base and near every checkpoint, and keeps the outputs, within a cap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sewa_cli.objective.model import Layout
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import Nest, rows, take_rows
from sewa_cli.solvers.linear.outputs import flatten, run_model, shapes_of
from sewa_cli.solvers.linear.surrogate import NAME, Part, Size, Surrogate
from sewa_cli.trajectory import ROWS, Deltas, Trajectory

# float32 vectors of length O besides the cache: the base, a mixture and its copy, the gradient, a
# swap, and more than as much again inside the user's loss
SPARE = 12


FEWEST = 32


class TooLittleRoom(ValueError):
    """Not even a single row fits."""


def build(
    objective: Objective,
    data: Iterable[Nest],
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
    batches = [batch for batch in data if rows(batch) > 0]
    if not batches:
        raise ValueError("there are no rows to take a mean over")
    of_rows = sum(rows(batch) for batch in batches)
    model.set(base)
    numbers = _count_outputs(objective, batches, seed)
    if numbers == 0:
        raise ValueError("predict() gives no floating-point tensors, so there is nothing to mix")
    every, share = batches, 1.0
    if most is not None and numbers > most and of_rows > FEWEST:
        share = max(most / numbers, FEWEST / of_rows)
        batches = _fewer_rows(every, share, seed)
        numbers = _count_outputs(objective, batches, seed)
    while (needed := least(k, numbers, extra)) > room:
        share *= room / needed  # again, if padding keeps what is left from shrinking as much
        batches = _fewer_rows(every, share, seed)
        if not batches:
            raise TooLittleRoom(
                f"the outputs of {k} checkpoints, even on one of {of_rows} rows, need more than "
                f"the {room} bytes there are; raise --memory"
            )
        numbers = _count_outputs(objective, batches, seed)
    wide = _need(k, numbers, torch.float32, extra) <= room  # of few, it is the smaller one

    at_base = torch.empty(numbers, dtype=torch.float32, device=model.device)
    parts: list[Part] = []
    for batch in batches:
        start = parts[-1].where.stop if parts else 0
        out = run_model(objective, batch, seed)
        flat = flatten(out)
        where = slice(start, start + len(flat))
        at_base[where] = flat
        parts.append(Part(batch, rows(batch), where, shapes_of(out)))
    cache = _empty_cache(k, at_base, wide, model.device)
    _fill(cache, objective, parts, base, at_base, checkpoints, h, seed, on_checkpoint)
    model.check_untouched()
    dtype = torch.float32 if wide else torch.bfloat16
    size = Size(
        numbers=numbers,
        dtype=str(dtype).removeprefix("torch."),
        bytes=_need(k, numbers, dtype, extra),
        rows=sum(part.n for part in parts),
        of_rows=of_rows,
    )
    return Surrogate(objective, parts, at_base, cache, size, seed)


def _empty_cache(k: int, at_base: Tensor, wide: bool, device: torch.device) -> Trajectory:
    O = len(at_base)  # noqa: E741 - the letter of the formulas
    layout = Layout({NAME: slice(0, O)}, {NAME: (O,)}, O, O)
    if wide:
        return Trajectory(k, layout, device)
    return Deltas(k, layout, device, torch.where(torch.isfinite(at_base), at_base, 0.0))


def _fill(
    cache: Trajectory,
    objective: Objective,
    parts: Sequence[Part],
    base: Tensor,
    at_base: Tensor,
    checkpoints: Callable[[], Iterable[tuple[int, Tensor]]],
    h: float,
    seed: int,
    on_checkpoint: Callable[[int], None] | None,
) -> None:
    """y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h into row i, always in the same memory."""
    step, reached = torch.empty_like(base), torch.empty_like(at_base)
    frozen = ~torch.isfinite(at_base)
    any_frozen = bool(frozen.any())
    for i, row in checkpoints():
        torch.lerp(base, row.to(base.device), h, out=step)
        objective.model.set(step)
        for part in parts:
            moved = flatten(run_model(objective, part.batch, seed))
            if len(moved) != part.where.stop - part.where.start:
                raise ValueError("predict() gives outputs whose size depends on the weights")
            reached[part.where] = moved
        reached.sub_(at_base).div_(h).add_(at_base)
        if any_frozen:
            reached[frozen] = 0.0  # as it is, whatever the weights
        if cache.append([(NAME, reached)]) is not None:
            raise ValueError(f"the outputs near checkpoint {i} are NaN or Inf; leave it out")
        if on_checkpoint is not None:
            on_checkpoint(i)


def _need(k: int, numbers: int, dtype: torch.dtype, extra: int) -> int:
    """Bytes of a cache of this precision, with what is computed beside it."""
    spare = SPARE + extra + (max(1, min(k, ROWS // 5)) + 1 if dtype == torch.bfloat16 else 0)
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
    total = sum(counts)
    kept = torch.zeros(total, dtype=torch.bool)
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    kept[drawn[: int(share * total)]] = True
    chosen = [part.nonzero().reshape(-1) for part in torch.split(kept, counts)]
    return [
        take_rows(batch, n, index)
        for batch, n, index in zip(batches, counts, chosen, strict=True)
        if len(index)
    ]
