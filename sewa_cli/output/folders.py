"""Packing a folder: it appears whole under its final name, or not at all.

A temporary folder beside the final place is filled, made safe on the disk and renamed. A folder
that is there already is replaced only with --force, and only if it is empty or was written by us.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sewa_cli.errors import OutputError
from sewa_cli.output.atomic import is_for_devices, sync_folder, told_as_output_error


class StagedFolder:
    """Filled beside its final place; `seal` ends the filling, `publish` puts it there."""

    def __init__(self, path: Path, force: bool) -> None:
        self.path = path
        self._force = force
        self._published = False
        token = secrets.token_hex(4)
        self._temporary = path.with_name(f".{path.name}.{token}.tmp")
        self._older = path.with_name(f".{path.name}.{token}.old")
        self._temporary.mkdir()

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """A new file of the folder, on the disk when the block ends."""
        with told_as_output_error(self.path / name), (self._temporary / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def seal(self) -> None:
        sync_folder(self._temporary)

    def publish(self) -> None:
        if self._force and self.path.exists():
            os.replace(self.path, self._older)
        if self.path.exists():
            raise OutputError(f"{self.path}: appeared while we worked; use --force")
        os.replace(self._temporary, self.path)
        self._published = True
        sync_folder(self.path.parent)

    def retract(self) -> None:
        """Take back what was published; what --force has replaced stands there again."""
        if self._published:
            shutil.rmtree(self.path, ignore_errors=True)
            self._published = False
        if self._older.exists():
            with suppress(OSError):
                os.replace(self._older, self.path)

    def discard(self) -> None:
        """Clear away what is left beside the final place; the older one only if it is replaced."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._published:
            shutil.rmtree(self._older, ignore_errors=True)


@contextmanager
def staged_folder(path: Path, force: bool = False) -> Iterator[StagedFolder]:
    """A `StagedFolder` that is discarded, whatever happens, unless it was published."""
    with told_as_output_error(path):
        stage = StagedFolder(path, force)
        try:
            yield stage
        finally:
            stage.discard()


def check_free_folder(path: Path, force: bool, is_ours: Callable[[Path], bool]) -> None:
    """Refuse, before any work is done, what could not be written or must not be replaced."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{str(path)!r}: is not a UTF-8 name; choose another") from None
    with told_as_output_error(path):
        parent = path.resolve().parent
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise OutputError(f"{path}: is not a folder; choose another name")
        if is_for_devices(parent):
            raise OutputError(f"{path}: {parent} is for devices; choose another folder")
        if path.exists() and not force:
            raise OutputError(f"{path}: exists; use --force to replace it, or another name")
        if path.exists() and any(path.iterdir()) and not is_ours(path):
            raise OutputError(f"{path}: is a folder that sewa did not write; choose another name")
        if not parent.is_dir():
            raise OutputError(f"{path.parent}: no such folder; make it first")
        if not os.access(parent, os.W_OK):
            raise OutputError(f"{path.parent}: is not writable; choose another with --output")
