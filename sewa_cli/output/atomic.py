"""Files and folders that appear whole under their final name, or not at all.

Each is written beside its final place, made safe on the disk and only then given its name. What is
there already is replaced only with --force, and a folder only if it is empty or was written by us.
"""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from sewa_cli.errors import OutputError


class Stage(ABC):
    """A file or folder beside its final place; `seal` ends the writing, `publish` puts it there."""

    def __init__(self, path: Path, force: bool) -> None:
        self.path = path
        self._force = force
        self._published = self._was_there = False
        token = secrets.token_hex(4)
        self._temporary = path.with_name(f".{path.name}.{token}.tmp")
        self._older = path.with_name(f".{path.name}.{token}.old")

    @classmethod
    @contextmanager
    def at(cls, path: Path, force: bool = False) -> Iterator[Self]:
        """To be written; whatever happens, nothing is left of it but what was published."""
        with as_output_error(path):
            stage = cls(path, force)
            try:
                yield stage
            finally:
                stage.discard()

    @abstractmethod
    def seal(self) -> None:
        """All bytes are on the disk: what can fail for want of space has not failed."""

    def publish(self) -> None:
        self._was_there = self.path.exists()
        self._take_place()
        self._published = True
        _sync_folder(self.path.parent)

    @abstractmethod
    def _take_place(self) -> None:
        """Give it its name; what --force replaces is kept as `_older`, where that is possible."""

    def retract(self) -> None:
        """Take back what was published; what --force has replaced stands there again."""
        with suppress(OSError):
            # where nothing of an older one could be kept, the new one is better than none
            if self._published and (self.path.is_dir() or not self._was_there):
                _remove(self.path)
            if self._older.exists():
                os.replace(self._older, self.path)

    def discard(self) -> None:
        """Clear away what is left beside the final place; the older one only if it is replaced."""
        _remove(self._temporary)
        if self.path.exists():
            _remove(self._older)

    def _appeared(self) -> OutputError:
        return OutputError(f"{self.path}: appeared while sewa was working; use --force")


class StagedFile(Stage):
    def __init__(self, path: Path, force: bool) -> None:
        super().__init__(path, force)
        self.file: IO[bytes] = open(self._temporary, "xb")  # noqa: SIM115

    def seal(self) -> None:
        _sync(self.file)
        self.file.close()

    def _take_place(self) -> None:
        if self._force:
            with suppress(OSError):  # there is none, or the file system has no hard links
                os.link(self.path, self._older)
            os.replace(self._temporary, self.path)
            return
        try:  # unlike a rename, a link fails if someone else made the file since we looked
            os.link(self._temporary, self.path)
            os.unlink(self._temporary)
        except FileExistsError:
            raise self._appeared() from None
        except OSError:  # a file system without hard links
            check_free(self.path, force=False)
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        with suppress(OSError):  # closing flushes, and on a full disk fails again
            self.file.close()
        super().discard()


class StagedFolder(Stage):
    def __init__(self, path: Path, force: bool) -> None:
        super().__init__(path, force)
        self._temporary.mkdir()

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """A new file of the folder, on the disk when the block ends."""
        with as_output_error(self.path / name), (self._temporary / name).open("xb") as file:
            yield file
            _sync(file)

    def seal(self) -> None:
        _sync_folder(self._temporary)

    def _take_place(self) -> None:
        if self._force and self.path.exists():
            os.replace(self.path, self._older)
        if self.path.exists():
            raise self._appeared()
        os.replace(self._temporary, self.path)


staged = StagedFile.at
staged_folder = StagedFolder.at


def publish_together(stages: Sequence[Stage]) -> None:
    """All of them appear, or none: each is sealed before the first gets its name."""
    for stage in stages:
        with as_output_error(stage.path):
            stage.seal()
    try:
        for stage in stages:
            with as_output_error(stage.path):
                stage.publish()
    except BaseException:
        for stage in stages:
            stage.retract()
        raise


@contextmanager
def as_output_error(path: Path | str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path}: cannot be written: {reason}; nothing was changed") from error


def check_free(path: Path, force: bool, is_ours: Callable[[Path], bool] | None = None) -> None:
    """Refuse, before any work is done, what could not be written in the end.

    A file is to be written; or a folder, of which `is_ours` says whether we wrote the older one.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{str(path)!r}: is not a UTF-8 name; choose another") from None
    with as_output_error(path):
        _check_file(path) if is_ours is None else _check_folder(path)
        if path.exists() and not force:
            raise OutputError(f"{path}: exists; use --force to replace it, or another name")
        if path.exists() and is_ours and any(path.iterdir()) and not is_ours(path):
            raise OutputError(f"{path}: is a folder that sewa did not write; choose another name")
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
    place = folder.resolve()
    return place in (Path("/dev"), Path("/dev/fd")) or Path("/proc") in (place, *place.parents)


def _remove(path: Path) -> None:
    """A file or a folder, if it is there and can be."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make new names themselves survive a power cut, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
