"""Arrays of .npz files, memory-mapped where that can be done."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sewa_cli.errors import TaskError
from sewa_cli.text import one_line


def open_arrays(path: Path, x: str, y: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """x [n, …] and y [n, …] of an .npz file, memory-mapped if they are not compressed.

    TaskError if they are missing or differ in length; pickles are refused.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inputs, targets = (_array(path, archive, name) for name in (x, y))
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
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


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    try:
        member = archive.getinfo(f"{name}.npy")
    except KeyError:
        names = ", ".join(entry.removesuffix(".npy") for entry in archive.namelist()) or "none"
        raise TaskError(f"{path}: no array {name!r}; there are {names}") from None
    if member.compress_type != zipfile.ZIP_STORED:
        with archive.open(member) as file:
            array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
            return array
    with path.open("rb") as file:
        # a local header: 26 bytes, the lengths of the name and of extra fields, then those two
        file.seek(member.header_offset + 26)
        lengths = struct.unpack("<HH", file.read(4))
        file.seek(sum(lengths), 1)
        return _map(path, file)


def _map(path: Path, file: Any) -> NDArray[Any]:
    """The .npy that starts at the position of `file`."""
    start = file.tell()
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject or 0 in shape or shape == ():  # pickles, and what cannot be mapped
        file.seek(start)
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
        return array
    offset = file.tell()
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")
