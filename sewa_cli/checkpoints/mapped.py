"""A safetensors file as NumPy views of its bytes: nothing is read or copied until it is used.

The safetensors library gives views to torch only; NumPy gets copies, and bfloat16 not in every
version. The library has checked the header before a file gets here, so what is left is to find
the tensors: an 8-byte length, a JSON header with offsets, the tensors' bytes.
"""

from __future__ import annotations

import errno
import mmap
import struct
import sys
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from sewa_cli.dtypes import DTYPES, RESERVED, Array
from sewa_cli.errors import CheckpointError
from sewa_cli.files import open_regular, parse_json


def views(data: bytes | mmap.mmap) -> dict[str, Array]:
    """Every tensor of a file, read-only, in place; ValueError if the bytes are not such a file.

    The file stays mapped as long as any of them is in use.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > len(data) - 8:
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = parse_json(data[8 : 8 + length])
        body = np.frombuffer(data, np.uint8)[8 + length :]
        return {
            name: _view(body, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != RESERVED
        }
    except (struct.error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a safetensors file: {error}") from error


def _view(body: Array, word: str, shape: tuple[int, ...], begin: int, end: int) -> Array:
    dtype = DTYPES[word]
    if not 0 <= begin <= end <= len(body) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"{word} {list(shape)} does not fit into bytes {begin}..{end}")
    return body[begin:end].view(dtype).reshape(shape)


def map_file(path: Path) -> dict[str, Array]:
    """The views of a file whose header the library has checked."""
    try:
        return views(mapped_bytes(path))
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "; raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
        raise CheckpointError(f"{path}: cannot be read: {reason}{hint}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: has changed since it was opened: {error}") from error


def mapped_bytes(path: Path) -> mmap.mmap:
    """A file's bytes, read-only; OSError if it is not a regular file, or empty."""
    # before Python 3.13 every mapping holds a descriptor, and 1000 checkpoints are not rare
    options: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)
    except OSError as error:
        if error.errno != errno.EMFILE or not _allow_more_files():
            raise
        return mapped_bytes(path)


def _allow_more_files() -> bool:
    """Raise the limit on open files to what the system allows, if it is lower."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such module
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return soft != hard
    return False
