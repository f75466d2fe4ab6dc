"""What was worked out before, under a key: for whoever would otherwise run the model again.

Only what the model has computed is kept, never what was decided from it: a decision is made again
from the same numbers, and says the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who only averages does not wait for torch
    import torch
    from torch import Tensor

# names, numbers, and tensors or nests of them, which count by what they hold
Key = tuple[Any, ...]
Tensors = Mapping[str, "Tensor"]


class Memo:
    """This one keeps nothing. What a key does not name is the concern of whoever made the memo."""

    recalled: int | None = None  # how often the model was not run; None: nothing is ever kept

    def recall(
        self, key: Key, make: Callable[[], Tensor], shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """What `make` gives, or gave under this key before: then on the processor."""

        def fits(found: Tensors) -> bool:
            return [*found] == [""] and shape in (None, found[""].shape)

        return self.recall_all(key, lambda: {"": make()}, fits)[""]

    def recall_all(
        self, key: Key, make: Callable[[], Tensors], fits: Callable[[Tensors], bool]
    ) -> Tensors:
        """The same for several. `fits`: whether it can be that; what is in a file may be anything.

        Whatever random numbers `make` draws are drawn: the generators are left as it left them.
        """
        del key, fits
        return make()

    def known(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """What `keep` was given under this key, if that is at hand, finite and of this shape."""
        del key, shape, dtype
        return None

    def keep(self, key: Key, value: Tensor) -> None: ...

    def digest(self, *things: Any) -> Hashable:
        """A name for what they hold, to be part of keys: hashed once, not for each key."""
        del things
        return None

    def within(self, scope: Callable[[], Key]) -> Memo:
        """The same where keys mean something else: `scope` is part of each, and asked for late."""
        del scope
        return self


def number(value: float) -> Tensor:
    import torch

    return torch.tensor(value, dtype=torch.float64)


def are_numbers(found: Tensors) -> bool:
    return all(value.ndim == 0 for value in found.values())


def have(**shapes: tuple[int, ...]) -> Callable[[Tensors], bool]:
    """Fits tensors with these names and shapes."""
    return lambda found: {name: (*x.shape,) for name, x in found.items()} == shapes
