"""Random numbers that depend on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_EXACT: Any = {"dtype": torch.float64}  # which holds all 32-bit numbers


def seed_torch(seed: int) -> None:
    """As torch.manual_seed, which also formats the stack for every kind of device there is not."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def seed_of(seed: int, *place: int) -> int:
    """One of its own for each place of many, below 2^63."""
    return int(np.random.SeedSequence((seed, *place)).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The user's code draws from seeded generators; the caller's are put back afterwards."""
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


def states() -> dict[str, torch.Tensor]:
    """Of the generators that user code draws from; for `put_back`."""
    kind, inner, gauss = random.getstate()
    numbers: Any = np.random.get_state(legacy=True)
    found = {
        "python": torch.tensor([kind, *inner, gauss is None, gauss or 0.0], **_EXACT),
        "numpy": torch.tensor([*numbers[1].tolist(), *numbers[2:]], **_EXACT),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        found["mps"] = torch.mps.get_rng_state()
    return found


def put_back(found: Mapping[str, torch.Tensor]) -> None:
    """Of any of them, as `states` has found it; ValueError, TypeError or RuntimeError if not."""
    for name, state in found.items():
        if name == "python":
            kind, *inner, has_none, gauss = state.tolist()
            whole = tuple(int(x) for x in inner)
            random.setstate((int(kind), whole, None if has_none else gauss))
        elif name == "numpy":
            *keys, place, has_gauss, gauss = state.tolist()
            if not (all(0 <= x < 2**32 for x in keys) and 0 <= place <= len(keys)):
                raise ValueError("no state of NumPy's generator")  # which does not look itself
            key = np.array(keys, dtype=np.uint32)
            np.random.set_state(("MT19937", key, int(place), int(has_gauss), gauss))
        elif name == "torch":
            torch.set_rng_state(state)
        elif name == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name)
