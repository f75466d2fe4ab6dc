"""Ready-made tasks: `huggingface`, `classification` and `gymnasium`, with YAML and no code.

Each module here has a `make(args, newest)` that checks `args`, reads the data, and returns a
`Ready`. `newest` opens the newest checkpoint, for a task that is made from it; None: there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sewa_cli.errors import TaskError

if TYPE_CHECKING:
    from sewa_cli.checkpoints import Checkpoint


@dataclass(frozen=True)
class Ready:
    """The functions of a task, the files it has read, and what its user should know.

    notes: said once; warnings: kept in the report of whatever chooses by these data.
    """

    functions: Mapping[str, Callable[..., Any]]
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


Newest = Callable[[], "Checkpoint"]


def import_library(who: str, name: str) -> Any:
    """Import an optional package, or say who needs it and how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        if error.name not in (None, name):  # it is there, and something that it needs is not
            raise
        raise TaskError(f"{who} needs {name}: pip install {name}") from None
