"""Rows that are in two sets of data at once: the choice, or its judge, has then seen the answers.

A row is known by the bytes of its tensors, so augmented rows are not recognised: a warning is
right, silence proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sewa_cli.nest import Nest, arrays, rows
from sewa_cli.run.bench import Bench, seeded

MOST_ROWS: Final = 20_000  # of each set
MOST_SECONDS: Final = 1.0  # training data may have to be decoded
SHARE: Final = 0.01  # of the selection rows: real data have a few twins


def warn_of_overlap(bench: Bench) -> None:
    """Selection rows among held-out rows, and among training rows."""
    task = bench.task
    if task.heldout_data is None and task.training_data is None:
        return
    with seeded(bench.config.seed):  # shuffling loaders draw; the run must not notice
        own = row_keys(task.selection_data)
        if not own or len(set(own)) < 0.9 * len(own):  # nothing that tells rows apart
            return
        if task.heldout_data is not None and (n := shared(own, task.heldout_data)):
            bench.warn(
                f"{n} of {len(own)} selection rows are in heldout_data too: the held-out loss is "
                "not held out"
            )
        if task.training_data is not None and (n := shared(own, task.training_data)):
            bench.warn(
                f"{n} of {len(own)} selection rows are in training_data too: a choice by rows that "
                "the model has seen may be worse than the mean of all; choose by fresh ones"
            )


def shared(own: list[bytes], others: Iterable[Nest]) -> int:
    """How many of one's rows are among the others'; 0 where that may be chance."""
    found = set(own) & set(row_keys(others))
    count = sum(key in found for key in own)
    return count if count >= SHARE * len(own) else 0


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
    parts = []
    for array in arrays(batch):
        if array.shape[0] != n:
            continue
        values = _as_bytes(array, n)
        if values is not None:
            parts.append(values)
    if not parts or not n:
        return []
    # a digest, not the bytes: images of twenty thousand rows would fill a gigabyte
    return [blake2b(row.tobytes(), digest_size=16).digest() for row in np.hstack(parts)]


def _as_bytes(array: object, n: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]] | None:
    if isinstance(array, Tensor):
        if array.layout != torch.strided or not array.numel():
            return None
        flat = array.detach().cpu().contiguous().reshape(n, -1)
        return flat.view(torch.uint8).numpy() if flat.dtype != torch.bool else flat.byte().numpy()
    if isinstance(array, np.ndarray) and array.dtype != object and array.size:
        return np.ascontiguousarray(array).reshape(n, -1).view(np.uint8)
    return None
