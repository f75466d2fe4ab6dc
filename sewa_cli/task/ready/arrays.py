"""Arrays of .npz files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sewa_cli.errors import TaskError
from sewa_cli.text import one_line


def open_arrays(path: Path, x: str, y: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read x [n, …] and y [n, …] from an .npz file.

    TaskError if they are missing or differ in length; pickles are refused.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if missing := [name for name in (x, y) if name not in archive]:
                names = ", ".join(archive) or "none"
                raise TaskError(f"{path}: no array {missing[0]!r}; there are {names}")
            inputs, targets = archive[x], archive[y]
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, TypeError) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise TaskError(f"{path}: cannot be read as .npz: {reason}") from error
    for name, array in ((x, inputs), (y, targets)):
        if array.ndim == 0 or len(array) == 0:
            raise TaskError(f"{path}: {name}: holds no rows")
    if len(inputs) != len(targets):
        raise TaskError(f"{path}: {len(inputs)} rows of {x}, but {len(targets)} of {y}")
    if inputs.dtype.kind not in "fiub":
        raise TaskError(f"{path}: {x}: must be numbers, found {inputs.dtype}")
    return inputs, targets
