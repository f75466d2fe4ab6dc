"""What a pass through the model takes: seconds, arithmetic, and the memory of its tensors.

On the `meta` device, where tensors have shapes and no numbers, that is known without doing it, for
a model of any size.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")
SHORT = 0.05  # seconds that may be spent on one that is hardly there


@dataclass(frozen=True)
class Observed:
    seconds: float
    flops: int  # of products and convolutions; the rest is little beside them
    bytes: int  # at most, of tensors that were made and not given back
    result: Any


def observe(work: Callable[[], Any]) -> Observed:
    with _Watch() as watch:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
    return Observed(seconds, watch.flops, watch.peak, result)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation; a storage counts from the one that made it until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.peak = self._now = 0
        self._known: dict[int, int] = {}  # storages → bytes; 0: they were there before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # there is no number: «is nothing masked?» is what models ask
        kwargs = kwargs or {}
        for tensor in self._tensors((args, kwargs)):
            self._keep(tensor, is_new=False)
        out = func(*args, **kwargs)
        for tensor in self._tensors(out):
            self._keep(tensor, is_new=True)
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        return out

    @staticmethod
    def _tensors(nest: Any) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]

    def _keep(self, tensor: Tensor, is_new: bool) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes() if is_new else 0
        self._known[storage._cdata] = size
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self._now -= self._known.pop(key, 0)


def seconds_of(work: Callable[[], object], most: float = 0.5) -> float:
    """The best of three: the first pays for pages and caches, and any may be disturbed.

    Fewer where that takes more than `most` seconds, more where it takes next to none.
    """
    found: list[float] = []
    while not found or sum(found) < (most if len(found) < 3 else min(most, SHORT)):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)
