"""Random numbers that depend on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_torch(seed: int) -> None:
    """Seed torch's generators, without torch.manual_seed's slow report on absent devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def seed_of(seed: int, *place: int) -> int:
    """Return a seed below 2^63 that is different for each place."""
    return int(np.random.SeedSequence((seed, *place)).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators for the user's code; restore the caller's afterwards."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        seed_torch(seed)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
