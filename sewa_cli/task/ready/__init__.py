"""Ready-made tasks: `task: huggingface` and `task: classification`, with YAML and no code.

Each module here has a `make(args)` that checks `args`, reads the data, and returns a `Ready`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ready:
    """The functions of a task, the files it has read, and what its user should know."""

    functions: Mapping[str, Callable[..., Any]]
    files: tuple[Path, ...]
    notes: tuple[str, ...]
