"""All that a run writes appears whole under its final names, or not at all, whatever ends the run.

Everything is written first: to files without a name, or into a hidden folder, the journal. Then,
with the folder locked and signals held off, names change in an order in which a reader never finds
a mixture. The journal keeps what is replaced until all is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from typing import IO, NamedTuple, cast

from sewa_cli.errors import OutputError
from sewa_cli.files import real
from sewa_cli.output.journal import Journal, Tell, settle_all
from sewa_cli.output.place import as_output_error, check_free
from sewa_cli.system import (
    copy,
    give_name,
    held_off,
    locked,
    sync,
    sync_folder,
    unnamed_file,
)

_MOST_UNNAMED = 64  # each holds a descriptor, and often there are no more than 256


# ---- what is being written -----------------------------------------------------------------------


class Digest(NamedTuple):
    name: str  # in a folder; of a file, nothing
    size: int
    sha256: str


class StagedFile:
    """A file on its way to `path`; until then it has no name, or one in the journal."""

    def __init__(self, path: Path, file: IO[bytes], at: Path | None = None) -> None:
        self.path = path
        self.file = file
        self._at = at
        self._sealed = False

    def seal(self) -> None:
        """All bytes are on the disk: what can fail for want of space has not failed."""
        if not self._sealed:
            sync(self.file)
        self._sealed = True
        if self._at is not None:  # descriptors are few
            self.file.close()

    def digests(self) -> list[Digest]:
        """When it is sealed."""
        if self._at is not None:
            return [_digest(self._at, "")]
        self.file.seek(0)
        return [_digest(self.file, "")]

    def appear(self) -> bool:
        """At its place at once. False: it cannot; it is in the journal, or the place is taken."""
        if self._at is not None or os.path.lexists(self.path):
            return False
        try:
            give_name(self.file, self.path)
        except FileExistsError:
            raise
        except OSError:
            return False
        with suppress(OSError):  # it is there
            sync_folder(self.path.parent)
        return True

    def arrive(self, place: Path) -> None:
        """Stand in the journal, under the final name."""
        if self._at is not None:
            self._at.rename(place)
            return
        try:
            give_name(self.file, place)
        except OSError:  # better twice on the disk than lost
            copy(self.file, place)

    def close(self) -> None:
        with suppress(OSError):  # closing flushes, and on a full disk fails again
            self.file.close()


class StagedFolder:
    """A folder on its way to `path`, in the journal until then."""

    def __init__(self, path: Path, at: Path) -> None:
        self.path = path
        self.at = at
        at.mkdir()

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """A new file of the folder, on the disk when the block ends."""
        with as_output_error(self.path / name), (self.at / name).open("xb") as file:
            yield file
            sync(file)

    def seal(self) -> None:
        sync_folder(self.at)

    def digests(self) -> list[Digest]:
        return [_digest(path, path.name) for path in sorted(self.at.iterdir())]

    def appear(self) -> bool:
        return False

    def arrive(self, place: Path) -> None:
        self.at.rename(place)

    def close(self) -> None: ...


Stage = StagedFile | StagedFolder


def _digest(source: Path | IO[bytes], name: str) -> Digest:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return _digest(file, name)
    found = file_digest(cast(BufferedReader, source), "sha256").hexdigest()
    return Digest(name, source.tell(), found)


# ---- publishing ----------------------------------------------------------------------------------


class Publication:
    """What one run writes. Whatever happens, nothing is left of it but what was published."""

    def __init__(self, force: bool = False, tell: Tell | None = None) -> None:
        self._force = force
        self._tell = tell
        self._journals: dict[Path, Journal] = {}
        self._stages: list[Stage] = []
        self._holds: set[Path] = set()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: object) -> None:
        with held_off():
            for stage in self._stages:
                stage.close()
            for journal in self._journals.values():
                journal.clear()

    def file(self, path: Path) -> StagedFile:
        """To be written; its path may still change."""
        with as_output_error(path):
            few = len(self._stages) < _MOST_UNNAMED
            unnamed = unnamed_file(path.parent) if few else None
            if unnamed is not None:
                stage = StagedFile(path, unnamed)
            else:
                at = self._journal(path.parent).make()
                stage = StagedFile(path, at.open("x+b"), at)
            self._stages.append(stage)
            return stage

    def folder(self, path: Path) -> StagedFolder:
        with as_output_error(path):
            stage = StagedFolder(path, self._journal(path.parent).make())
            self._stages.append(stage)
            return stage

    @contextmanager
    def locked(self, *paths: Path | None) -> Iterator[None]:
        """While it lasts nobody else publishes beside these: between looking and publishing."""
        with ExitStack() as stack:
            with as_output_error(next(path for path in paths if path is not None)):
                parents = {real(path.parent) for path in paths if path is not None}
                stack.enter_context(locked(parents, self._tell))
            self._holds = parents
            for parent in parents:  # somebody may have been killed since the work began
                settle_all(parent)
            yield
            self._holds = set()

    def _journal(self, parent: Path) -> Journal:
        parent = real(parent)
        if parent not in self._journals:
            # an interrupt may end the waiting, but not come between making it and knowing of it
            with locked({parent} - self._holds, self._tell), held_off():
                self._journals[parent] = Journal.create(parent)
        return self._journals[parent]

    def publish(
        self, stages: Sequence[Stage], then: Sequence[Stage] = (), gone: Sequence[Path] = ()
    ) -> None:
        """All get their names, in this order, or none; `gone` lose theirs before, in this order.

        The last of `stages` makes the output the new one; `then` follows it: its report.
        """
        for stage in (*stages, *then):
            with as_output_error(stage.path):
                stage.seal()
        with as_output_error((*stages, *then)[-1].path), held_off():
            try:
                # one new file needs no journal
                if len([*stages, *then, *gone]) > 1 or not stages[0].appear():
                    self._change_names(stages, then, gone)
            except FileExistsError as error:
                raise OutputError(
                    f"{error.filename2 or error.filename}: appeared while sewa was working; use "
                    "--force"
                ) from None

    def _change_names(
        self, stages: Sequence[Stage], then: Sequence[Stage], gone: Sequence[Path]
    ) -> None:
        steps = [(self._journal(s.path.parent), s) for s in (*stages, *then)]
        losing = [(self._journal(path.parent), path.name) for path in gone]
        for journal, stage in steps:
            stage.arrive(journal.new(stage.path.name))
        plans = {}
        for journal in self._journals.values():
            mains = [s.path.name for j, s in steps if j is journal and s in stages]
            names = [s.path.name for j, s in steps if j is journal]
            lost = [name for j, name in losing if j is journal]
            main = [*names, *mains][-1]
            plans[journal] = journal.plan(names, lost, main, self._force)
        try:
            for journal, plan in plans.items():
                journal.begin(plan)
            for journal, name in losing:
                journal.take_out(name)
            if losing:
                for journal in plans:
                    journal.sync()
            for journal, stage in steps:
                journal.place(stage.path.name, plans[journal])
        except BaseException:
            with ExitStack() as all_of_them:  # if one cannot be, the others are
                for journal, plan in plans.items():
                    all_of_them.callback(journal.take_back, plan)
            raise
        for journal in plans:
            with suppress(OSError):  # all names are right; the next run will see that
                journal.commit()


def write_file(path: Path, write: Callable[[IO[bytes]], object], force: bool = False) -> None:
    """One file, whole or not at all."""
    with Publication(force) as publication:
        stage = publication.file(path)
        with as_output_error(path):
            write(stage.file)
        with publication.locked(path):
            check_free(path, force)
            publication.publish([stage])
