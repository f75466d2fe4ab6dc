"""Results of the model under a key, for whoever would otherwise run it again.

Only what the model has computed is kept, never what was decided from it: a decision is made again
from the same numbers, and says the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sewa_cli.rng import seed_of, seeded

# names, numbers, and tensors or nests of them, which count by what they hold
Key = tuple[Any, ...]
Tensors = Mapping[str, Tensor]


class Memo:
    """A memo that keeps nothing; the one of `--cache` does."""

    recalled: int | None = None  # how many results were found; None: nothing is ever kept

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def recall(self, key: Key, make: Callable[[], Tensor], draw: int = 0) -> Tensor:
        """Return what `make` gives, or gave under this key before: then on the processor."""
        return self.recall_all(key, lambda: {"": make()}, draw)[""]

    def recall_all(self, key: Key, make: Callable[[], Tensors], draw: int = 0) -> Tensors:
        """Return several tensors in the same way.

        Random numbers that `make` draws depend on the seed and on `draw` alone. So it leaves no
        trace in those of others, whether it is called or not.
        """
        found = self.known(key)
        if found is None:
            with seeded(seed_of(self._seed, draw)):
                found = make()
            self.keep(key, found)
        return found

    def known(self, key: Key) -> Tensors | None:
        """Return what `keep` was given under this key, if that is at hand."""
        del key
        return None

    def keep(self, key: Key, found: Tensors) -> None: ...

    def digest(self, *things: Any) -> str:
        """Return a name for their content, to be part of keys: hashed once, not for each key."""
        del things
        return ""


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
