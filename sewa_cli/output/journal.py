"""What a publication keeps until all its names are right, so that it can be taken back.

A run that is killed leaves its journal behind. The next one in that folder finds it, and takes back
what the dead one began, or finishes it.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sewa_cli.errors import OutputError
from sewa_cli.files import read_bytes, read_json
from sewa_cli.output.place import is_journal
from sewa_cli.system import (
    exchange,
    held_off,
    identity,
    lock,
    locked,
    open_folder,
    put,
    remove,
    replace,
    sync_folder,
)

_DAY = 86_400  # seconds
_LONGEST_PLAN = 2**24  # bytes
Identity = int
Tell = Callable[[str], None]


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
            settle_all(folder, tell)


def settle_all(folder: Path, tell: Tell | None = None) -> None:
    """The same for who has locked the folder."""
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
