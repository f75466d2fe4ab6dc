"""Rows that are in two sets of data at once: the choice, or its evaluation, has seen the answers.

A row is known by the bytes of its tensors and words, but for its padding where an `attention_mask`
says what that is. Augmented rows are not recognised: silence proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sewa_cli.errors import TaskError, UserCodeError
from sewa_cli.objective.objective import Data
from sewa_cli.objective.tree import Nest, has_rows, is_words, nodes, rows
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
            own = row_keys(selection)
            if len(set(own)) < 0.9 * len(own):  # nothing that tells rows apart
                return
            for name, (data, why) in others.items():
                if n := 0 if data is None else shared(own, data):
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
    """Return a digest of each row, for as many as there is time for."""
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
    parts = [part for leaf in nodes(batch) if (part := _by_row(leaf, n, mask))]
    # digests, not the bytes: images of twenty thousand rows would fill a gigabyte
    digests = (blake2b(b"".join(row), digest_size=16) for row in zip(*parts, strict=True))
    return [digest.digest() for digest in digests]


def _by_row(leaf: Any, n: int, mask: Any) -> list[bytes]:
    """Return the bytes of each of n rows, where the mask is not zero; [] if it has no such rows."""
    if is_words(leaf, n):
        return [str(word).encode() for word in leaf]
    if isinstance(leaf, np.ndarray) and leaf.dtype != object and leaf.ndim and len(leaf) == n:
        return [row.tobytes() for row in leaf]
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or not has_rows(leaf, n):
        return []
    whole = leaf.detach().cpu().resolve_conj().resolve_neg()
    is_masked = isinstance(mask, Tensor) and leaf.shape == mask.shape != (n,)
    kept = (row[there != 0] for row, there in zip(whole, mask, strict=True)) if is_masked else whole
    return [row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for row in kept]
