"""A memo of results by key, which `Objective.recall` asks; `--cache` has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

# names, numbers, and tensors or nests of them, which count by what they hold
Key = tuple[Any, ...]
Tensors = Mapping[str, Tensor]


class Memo(Protocol):
    """Only what the model has computed is kept, never what was decided from it."""

    @property
    def recalled(self) -> int:
        """Return how many results were found."""

    def known(self, key: Key) -> Tensors | None:
        """Return what `keep` was given under this key, if that is at hand."""

    def keep(self, key: Key, found: Tensors) -> None: ...

    def digest(self, *things: Any) -> str:
        """Return a name for their content, to be part of keys: hashed once, not for each key."""
