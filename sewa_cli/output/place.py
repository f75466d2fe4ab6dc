"""Whether something may be written at a place: refused before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sewa_cli.errors import OutputError
from sewa_cli.files import real
from sewa_cli.publish import is_temporary, new_file


@contextmanager
def as_output_error(path: Path | str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except FileExistsError as error:
        raise OutputError(f"{path}: appeared while sewa was working; use --force") from error
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def new_output(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """Open a file to write; it appears whole when the block ends, or not at all."""
    with as_output_error(path), new_file(path, force) as file:
        yield file


def check_free(path: Path, force: bool, is_ours: Callable[[Path], bool] | None = None) -> None:
    """Refuse, before any work is done, what could not be written in the end.

    A file is to be written; or a folder, of which `is_ours` says whether we wrote the older one.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{str(path)!r}: is not a UTF-8 name; choose another") from None
    if is_temporary(path.name):
        raise OutputError(f"{path}: is a name that sewa clears away; choose another")
    with as_output_error(path):
        _check_file(path) if is_ours is None else _check_folder(path)
        if path.exists() and not force:
            raise OutputError(f"{path}: exists; use --force to replace it, or another name")
        if path.exists() and is_ours and any(path.iterdir()) and not is_ours(path):
            raise OutputError(
                f"{path}: has files in it that sewa did not write; choose another name"
            )
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent}: no such folder; make it first")
        if not os.access(path.parent, os.W_OK):
            raise OutputError(f"{path.parent}: is not writable; choose another with --output")


def _check_file(path: Path) -> None:
    if not path.name or path.is_dir():
        raise OutputError(f"{path}: is a folder; name a file")
    # --force would put a file in the place of a device, a pipe or what /dev/stdout is a link to
    if _is_for_devices(path.parent) or (path.exists() and not path.is_file()):
        raise OutputError(
            f"{path}: is not a regular file; name one, or use -o - for standard output"
        )
    if path.is_symlink() and not path.exists():
        raise OutputError(f"{path}: is a broken link; choose another name")


def _check_folder(path: Path) -> None:
    if path.name in ("", ".."):
        raise OutputError(f"{path}: cannot be replaced; name a new folder")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OutputError(f"{path}: is not a folder; choose another name")
    if _is_for_devices(path.parent):
        raise OutputError(f"{path}: {path.parent} is for devices; choose another folder")


def _is_for_devices(folder: Path) -> bool:
    """Whether what stands in it is the system's; /dev/shm is for anybody's files."""
    place = real(folder)
    return place in (Path("/dev"), Path("/dev/fd")) or Path("/proc") in (place, *place.parents)
