"""Rows that are in two sets of data at once: the choice, or its evaluation, has seen the answers.

A row is known by the bytes of all it is made of, but for its padding where an `attention_mask` says
what that is. Augmented rows are not recognised, and of a batch
with anything but arrays and strings nothing is said: silence proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sewa_cli.errors import TaskError, UserCodeError
from sewa_cli.objective.objective import Data
from sewa_cli.objective.tree import Nest, rows
from sewa_cli.rng import seeded

MOST_ROWS: Final = 20_000  # of each set
MOST_SECONDS: Final = 1.0  # data may have to be decoded
FEWEST_TWINS, TWIN_SHARE = 5, 0.01  # of the selection rows: real data have a few twins


def find_overlap(
    selection: Data, heldout: Data | None, training: Data | None, seed: int
) -> Iterator[str]:
    """Yield a sentence for data that change from pass to pass, and for rows in two sets.

    A courtesy: whatever is raised in here, the run goes on without it.
    """
    others = {
        "heldout_data": (heldout, "the held-out loss is not held out"),
        "training_data": (
            training,
            "a choice by examples that the model has seen may be worse than the mean of all; "
            "choose by fresh ones",
        ),
    }
    try:
        for name, data in (("selection_data", selection), ("heldout_data", heldout)):
            if data is not None and _first(data, seed) != _first(data, seed):
                yield (
                    f"{name} gives other examples or another order in each pass, so averages are "
                    "not compared example by example; do not shuffle, or seed anew in each pass"
                )
        with seeded(seed):  # loaders draw; the run must not notice
            own: list[bytes] = []
            for name, (data, why) in others.items():
                if data is None:
                    continue
                own = own or row_keys(selection)
                if len(set(own)) < 0.9 * len(own):  # nothing that tells rows apart
                    return
                if n := shared(own, data):
                    seen = f"{n} of the {len(own)} selection examples looked at"
                    yield f"{seen} are in {name} too: {why}"
    except Exception as error:
        if isinstance(error, TaskError) and not isinstance(error, UserCodeError):
            raise  # what a function has done stays done, such as another working directory


def _first(data: Data, seed: int) -> list[bytes]:
    with seeded(seed):  # as each pass is
        return _keys(next(iter(data), ()))


def shared(own: list[bytes], others: Iterable[Nest]) -> int:
    """Count the rows that are among the others too; 0 where that may be chance."""
    found = set(own) & set(row_keys(others))
    count = sum(key in found for key in own)
    return count if count >= max(FEWEST_TWINS, TWIN_SHARE * len(own)) else 0


def row_keys(batches: Iterable[Nest]) -> list[bytes]:
    """A digest of each row, of all its tensors together, for as many as there is time for."""
    keys: list[bytes] = []
    started = time.monotonic()
    for batch in batches:
        keys += _keys(batch)
        if len(keys) >= MOST_ROWS or time.monotonic() - started > MOST_SECONDS:
            break
    return keys


def _keys(batch: Nest) -> list[bytes]:
    n = rows(batch)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    parts = [_by_row(leaf, n, mask) for leaf in _leaves(batch)]
    if not parts or any(part is None for part in parts):
        return []
    # a digest, not the bytes: images of twenty thousand rows would fill a gigabyte
    return [
        blake2b(b"".join(row), digest_size=16).digest()
        for row in zip(*(part for part in parts if part), strict=True)
    ]


def _leaves(batch: Nest) -> Iterator[object]:
    """Arrays, lists of strings, and whatever else there is; single numbers belong to no row."""
    if isinstance(batch, Mapping):
        for item in batch.values():
            if not isinstance(item, int | float):
                yield from _leaves(item)
    elif isinstance(batch, list | tuple) and not all(isinstance(item, str) for item in batch):
        for item in batch:
            yield from _leaves(item)
    elif batch is not None and (not hasattr(batch, "shape") or batch.shape):
        yield batch


def _by_row(leaf: object, n: int, mask: object = None) -> list[bytes] | None:
    """The bytes of each of n rows, where the mask is not zero; None if it has no such rows."""
    if isinstance(leaf, Tensor) and isinstance(mask, Tensor) and leaf.shape == mask.shape != (n,):
        kept = (row[there != 0].detach().cpu() for row, there in zip(leaf, mask, strict=True))
        return [row.view(torch.uint8).numpy().tobytes() for row in kept]
    if isinstance(leaf, list | tuple) and len(leaf) == n:
        return [str(item).encode() for item in leaf]
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        whole = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(n, -1)
        leaf = whole.view(torch.uint8).numpy() if whole.numel() else None
    if isinstance(leaf, np.ndarray) and leaf.dtype != object and len(leaf) == n and leaf.size:
        return [row.tobytes() for row in np.ascontiguousarray(leaf).reshape(n, -1)]
    return None
