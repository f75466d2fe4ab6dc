"""All that a run writes appears whole under its final names, or not at all, whatever ends the run.

Everything is written first: to files without a name, or into a hidden folder, the journal. Then,
with the folder locked and signals held off, names change in an order in which a reader never finds
a mixture. The journal keeps what is replaced until all is done. A run that is killed leaves it
behind, and the next one in that folder takes back what the dead one began, or finishes it.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from sewa_cli.errors import OutputError
from sewa_cli.files import read_bytes, read_json, real
from sewa_cli.output.place import as_output_error, check_free, is_journal
from sewa_cli.output.system import (
    copy,
    exchange,
    give_name,
    held_off,
    identity,
    lock,
    locked,
    open_folder,
    put,
    remove,
    replace,
    sync,
    sync_folder,
    unnamed_file,
)

_DAY = 86_400  # seconds
_MOST_UNNAMED = 64  # each holds a descriptor, and often there are no more than 256
_LONGEST_PLAN = 2**24  # bytes
Identity = int
Tell = Callable[[str], None]


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
        self._at = at
        at.mkdir()

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """A new file of the folder, on the disk when the block ends."""
        with as_output_error(self.path / name), (self._at / name).open("xb") as file:
            yield file
            sync(file)

    def seal(self) -> None:
        sync_folder(self._at)

    def digests(self) -> list[Digest]:
        return [_digest(path, path.name) for path in sorted(self._at.iterdir())]

    def appear(self) -> bool:
        return False

    def arrive(self, place: Path) -> None:
        self._at.rename(place)

    def close(self) -> None: ...


Stage = StagedFile | StagedFolder


def _digest(source: Path | IO[bytes], name: str) -> Digest:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return _digest(file, name)
    found = file_digest(cast(BufferedReader, source), "sha256").hexdigest()
    return Digest(name, source.tell(), found)


# ---- the journal ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which names change, and which files they are: nothing else is ever touched."""

    new: dict[str, Identity]  # in the order in which they get their names
    old: dict[str, Identity]  # what has these names now, or one of the next
    gone: list[str]  # names that are taken away first, in this order
    main: str  # of `new`: once it has its name, the output is the new one


class Journal:
    """The hidden folder of a publication, beside its outputs; its live writer holds a lock on it.

    host        whose it is: some locks are not seen by other hosts
    made/N      being written
    new/NAME    waits for its name; or, exchanged, is what had that name before
    old/NAME    had that name before
    plan.json   from when all of `new` is on the disk until all names are right
    """

    def __init__(self, parent: Path, folder: Path, descriptor: int) -> None:
        self._parent = parent
        self._folder = folder
        self._descriptor = descriptor
        self._count = 0

    @classmethod
    def create(cls, parent: Path) -> Journal:
        """With the parent locked, or another run could take it for a dead one's."""
        folder = parent / f".sewa-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            journal = cls(parent, folder, open_folder(folder))
            lock(journal._descriptor)
            (folder / "host").write_text(platform.node(), encoding="utf-8")
            for name in ("made", "new", "old"):
                (folder / name).mkdir()
        except OSError:
            remove(folder)
            raise
        return journal

    def make(self) -> Path:
        """A name for what is being written."""
        self._count += 1
        return self._folder / "made" / str(self._count)

    def new(self, name: str) -> Path:
        return self._folder / "new" / name

    def _kept(self, name: str, plan: Plan) -> Path | None:
        """What had that name before, if it is here."""
        places = (self._folder / "old" / name, self.new(name))
        known = plan.old.get(name)
        return next((p for p in places if known is not None and identity(p) == known), None)

    def begin(self, plan: Plan) -> None:
        written = self._folder / "plan"
        with written.open("x", encoding="utf-8") as file:
            json.dump(vars(plan), file)
            file.flush()
            os.fsync(file.fileno())
        written.rename(self._folder / "plan.json")
        for folder in (self._folder / "new", self._folder, self._parent):
            sync_folder(folder)

    def plan(self, new: Sequence[str], gone: Sequence[str], main: str, force: bool) -> Plan:
        """As things are now; without `force`, what has the name of a new one is not replaced."""
        names = (*gone, *new) if force else gone
        old = {name: identity(self._parent / name) for name in names}
        here = {name: identity(self.new(name)) for name in new}
        return Plan(
            {name: found for name, found in here.items() if found is not None},
            {name: found for name, found in old.items() if found is not None},
            list(gone),
            main,
        )

    def take_out(self, name: str) -> None:
        (self._parent / name).rename(self._folder / "old" / name)

    def place(self, name: str, plan: Plan) -> None:
        target = self._parent / name
        known = plan.old.get(name)
        if known is not None and identity(target) == known:
            replace(self.new(name), target, self._folder / "old" / name)
        else:
            put(self.new(name), target)

    def undo(self, plan: Plan) -> None:
        """All names as they were before; on the way there, too, no mixture is to be seen."""
        for name, new in reversed(plan.new.items()):
            target, kept = self._parent / name, self._kept(name, plan)
            if identity(target) != new:
                continue
            if kept is None or name in plan.gone:
                if identity(self.new(name)) == new:  # under two names
                    target.unlink()
                else:
                    target.rename(self.new(name))
            elif not exchange(kept, target):
                if target.is_dir():
                    target.rename(self.new(name))
                os.replace(kept, target)
        for name in reversed(plan.old):
            kept = self._kept(name, plan)
            if kept is not None and not os.path.lexists(self._parent / name):
                put(kept, self._parent / name)

    def take_back(self, plan: Plan) -> None:
        """Undo; or say that it could not be done, and who will do it."""
        try:
            self.undo(plan)
            self.commit()
        except OSError as error:
            raise OutputError(
                f"{self._parent / plan.main}: cannot be written: {error.strerror or error}; what "
                f"was there before is in {self._folder.name}, and the next run puts it back"
            ) from error

    def finish(self, plan: Plan) -> None:
        """Names for those that have none yet, if they are free."""
        for name, new in plan.new.items():
            if identity(self.new(name)) == new and not os.path.lexists(self._parent / name):
                put(self.new(name), self._parent / name)

    def sync(self) -> None:
        sync_folder(self._parent)

    def commit(self) -> None:
        """From now on there is nothing to take back."""
        with suppress(OSError):  # all names are right; that they stay is all that it could tell
            self.sync()
        (self._folder / "plan.json").unlink(missing_ok=True)

    def settle(self) -> bool:
        """Of a dead run: finish it if its output is there, or else take it back; and clear away.

        False, and nothing is touched: it may be alive, or things are not as its plan knows them.
        What is in the journal may then be all that is left of them.
        """
        if not self._is_from_here():
            return False
        if (self._folder / "plan.json").exists():
            plan = _read_plan(self._folder / "plan.json")
            if plan is None or not self._knows(plan):
                return False
            is_there = identity(self._parent / plan.main) == plan.new.get(plan.main)
            self.finish(plan) if is_there else self.undo(plan)
            self.commit()
        remove(self._folder)
        return True

    def _is_from_here(self) -> bool:
        """A lock may be this host's alone; who was on another has not written for a day."""
        try:
            host = read_bytes(self._folder / "host", 1000).decode("utf-8")
        except (OSError, ValueError):
            host = ""
        if host in (platform.node(), ""):  # or it was killed before it could say
            return True
        written = (*self._folder.glob("made/*"), *self._folder.glob("made/*/*"))
        newest = max(path.lstat().st_mtime for path in (self._folder, *written))
        return newest < time.time() - _DAY

    def _knows(self, plan: Plan) -> bool:
        """All that it names is there, and nothing else has its names.

        Not so after a copy to another disk, or where somebody else has published since.
        """
        for name in {**plan.old, **plan.new}:
            known = {plan.old.get(name), plan.new.get(name)} - {None}
            here = {identity(p) for p in (self._folder / "old" / name, self.new(name))}
            there = identity(self._parent / name)
            if (there is not None and there not in known) or not known <= {there, *here}:
                return False
        return True

    def clear(self) -> None:
        if not (self._folder / "plan.json").exists():
            remove(self._folder)
        os.close(self._descriptor)


def _read_plan(path: Path) -> Plan | None:
    """A plan may be a stranger's: names must be plain names, or it is none."""
    try:
        content: Any = read_json(path, _LONGEST_PLAN)
        new, old = (
            {_plain(name): _number(found) for name, found in content[part].items()}
            for part in ("new", "old")
        )
        return Plan(new, old, [_plain(name) for name in content["gone"]], _plain(content["main"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _plain(name: str) -> str:
    os.fsencode(name)
    if name in ("", ".", "..") or "/" in name or "\0" in name or is_journal(name):
        raise ValueError(name)
    return name


def _number(found: object) -> int:
    if type(found) is not int:
        raise TypeError(found)
    return found


def recover(folder: Path, tell: Tell | None = None) -> None:
    """Clear away what killed runs have left in a folder; those of live ones are locked."""
    if _journals(folder):
        with suppress(OSError), locked([folder], tell):
            _recover(folder, tell)


def _recover(folder: Path, tell: Tell | None) -> None:
    """With the folder locked."""
    for found in _journals(folder):
        with suppress(OSError), held_off():
            descriptor = open_folder(found)
            try:
                is_ours = os.fstat(descriptor).st_uid == os.geteuid()
                if is_ours and lock(descriptor):
                    settled = Journal(folder, found, descriptor).settle()
                    if not settled and tell is not None:
                        tell(
                            f"{found}: is left of a run on another host, or does not fit what is "
                            "there; what a killed run replaced may be in it: look, and remove it"
                        )
            finally:
                os.close(descriptor)


def _journals(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if is_journal(p.name) and not p.is_symlink()]
    except OSError:
        return []  # told when something is to be written there


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
                _recover(parent, None)
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
            for journal, plan in plans.items():
                journal.take_back(plan)
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
