"""Stand-ins for the objects in a pickle: they remember what they were made of, and do nothing.

They take the place of harmless classes that lie next to weights, such as argparse.Namespace, and
are written as what they stand for.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

_MODULES = {  # module → the names in it that have a stand-in
    "argparse": "Namespace",
    "builtins": "bool bytes dict float frozenset int list str tuple",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode BytesNode FloatNode IntegerNode PathNode StringNode",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "torch.torch_version": "TorchVersion",
    "typing": "Any",
}


class Inert:
    """An object: its class's name is that of the class it stands for."""

    args: tuple[Any, ...] = ()
    state: Any = None
    is_called = False  # by REDUCE, not by NEWOBJ

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any) -> None:
        self.is_called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_called:
            return type(self), self.args, self.state
        return copyreg.__newobj__, (type(self), *self.args), self.state  # type: ignore[attr-defined]


def _make_class(module: str, name: str) -> type[Inert]:
    return type(name, (Inert,), {"__module__": module, "__qualname__": name})


class Refused(pickle.UnpicklingError): ...


def load(data: bytes, is_allowed: Callable[[str, str], bool]) -> Any:
    """Unpickle with a stand-in for each class and function; raises whatever a torn pickle does."""
    return _Unpickler(data, is_allowed).load()


class _Unpickler(pickle._Unpickler):
    """Python's own, as the one in C reserves as much memory as a pickle asks for."""

    def __init__(self, data: bytes, is_allowed: Callable[[str, str], bool]) -> None:
        super().__init__(io.BytesIO(data))
        self._is_allowed = is_allowed
        self._classes: dict[tuple[str, str], type[Inert]] = {}  # which the pickle may change

    def find_class(self, module: str, name: str) -> type[Inert]:
        if not self._is_allowed(module, name):
            raise Refused(f"{module}.{name}")
        return self._classes.setdefault((module, name), _make_class(module, name))


@cache
def harmless() -> dict[Any, bytes]:
    """Return the stand-ins for what may lie next to weights, and how a pickle names each.

    A defaultdict becomes a dict: PyTorch fills no other class with items.
    """
    found = {
        _make_class(module, name): f"{module}\n{name}\n".encode()
        for module, names in _MODULES.items()
        for name in names.split()
    }
    to_dict = {"__module__": "collections", "__new__": lambda _, *__: {}}
    return {**found, type("defaultdict", (), to_dict): b"collections\ndefaultdict\n"}


_Base: Any = pickle._Pickler  # mypy knows only its public half


class Pickler(_Base):  # type: ignore[misc]
    """Write stand-ins as what they stand for, by names that no pickle can have changed."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and obj in harmless():
            self.write(pickle.GLOBAL + harmless()[obj])
            self.memoize(obj)
        else:
            super().save_global(obj, name)
