"""A device that is not the CPU, without a GPU: `standin`, written in Python.

PrivateUse1 is registered from Python (device guard, hooks), so that autograd knows the device. Its
tensors are wrappers that run every operation on a CPU tensor inside. They refuse to meet CPU
tensors, as those of a GPU would: a forgotten `.to(device)` raises. And each time that the program
waits for the device (a number is looked at, a tensor brought to the CPU), it is written down.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

NAME = "standin"
aten = torch.ops.aten
# waits for the device: a number that is looked at, or sizes that depend on numbers
_LOOKS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2}
_waits: list[str] | None = None  # where each was asked for; None: nobody counts


def _wait(what: str) -> None:
    if _waits is None:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and "sewa_cli" not in frame.f_code.co_filename:
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "the test"
    _waits.append(f"{what} at {where}")


@contextmanager
def counting() -> Iterator[list[str]]:
    """Collects the waits for the device in here."""
    global _waits
    before, _waits = _waits, []
    try:
        yield _waits
    finally:
        _waits = before


class OnDevice(Tensor):
    """A tensor of the device; `raw` is its data, on the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.raw = raw
        return made

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:  # `parameter.data = view` takes the view's data along
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.raw = other.raw

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:  # FSDP frees what it has gathered through it
        return self.raw.untyped_storage()

    def __deepcopy__(self, memo: Any) -> OnDevice:
        return OnDevice(self.raw.clone())

    def tolist(self) -> Any:
        _wait("tolist")
        return self.raw.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.raw})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), op.overloadpacket
        if name is aten._to_copy:
            device = kwargs.pop("device", None)
            kwargs.pop("non_blocking", None)
            was_here = isinstance(args[0], OnDevice)
            stays = was_here if device is None else device.type == NAME
            if was_here and not stays:
                _wait("a copy to the CPU")
            made = op(args[0].raw if was_here else args[0], **kwargs)
            return OnDevice(made) if stays else made
        if name in (aten.copy_, aten._copy_from):  # the one meeting place
            if not isinstance(args[0], OnDevice):
                _wait("a copy to the CPU")
            op(*(_raw(one) for one in args), **kwargs)
            return args[0]
        if name in _LOOKS:
            _wait(str(name))
        flat, spec = tree.tree_flatten((args, kwargs))
        here = [one for one in flat if isinstance(one, OnDevice)]
        # a GPU takes a number from the CPU, that is a tensor without dimensions
        others = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, OnDevice)]
        if here and any(one.dim() > 0 for one in others):
            raise RuntimeError(f"{op}: a tensor on {others[0].device} met one on {NAME}")
        raws = [_raw(one) for one in flat]
        raw_args, raw_kwargs = tree.tree_unflatten(raws, spec)
        made = op(*raw_args, **raw_kwargs)
        known = {id(raw): one for raw, one in zip(raws, flat, strict=True) if raw is not one}

        def wrapped(one: Any) -> Any:
            if id(one) in known:  # it was worked on in place
                return known[id(one)]
            return OnDevice(one) if isinstance(one, Tensor) else one

        return tree.tree_map(wrapped, made)


def _raw(one: Any) -> Any:
    if isinstance(one, OnDevice):
        return one.raw
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


class _AtOnce:
    """A stream, or an event in one: all is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = __exit__ = _nothing

    def record_event(self, *_: Any) -> _AtOnce:
        return self

    def __enter__(self) -> _AtOnce:
        return self


def _register() -> Any:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    setup: Callable[[str], None] = _setup_privateuseone_for_python_backend
    setup(NAME)
    module = getattr(torch, NAME)  # torch asks every device for its random numbers
    module.get_rng_state = lambda *_: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = module.manual_seed_all = lambda *_: None
    module.Stream = module.Event = module.current_stream = _AtOnce  # for FSDP
    module.stream = lambda stream: stream
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("empty.memory_format", _empty, "PrivateUse1")
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


_library = _register()  # for as long as the process lives
