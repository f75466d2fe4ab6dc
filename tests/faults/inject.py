"""Runs commands of `sewa` in forked children, with a fault at a chosen call that changes a folder.

Started as a process of its own, it imports everything once and then takes requests, one JSON a
line, each a list of runs to start together; see `driver.Run` for what one may ask for. All calls by
which Python reaches the system calls that change files are wrapped before anything of sewa is
imported. Those on the watched folder are *points*: numbered, noted, and before or after the N-th
of them a signal is sent, or in its place an error raised.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import gc
import io
import json
import mmap
import os
import random
import selectors
import shutil  # before `os` is wrapped: it looks there for what the system can do
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

assert shutil.rmtree.avoids_symlink_attacks
assert tempfile

# The calls that change files; a new way to publish goes into one of these four lines, and
# test_points shows if one is missing. To open is a change only if it creates or truncates.
BY_PATH = "open mkdir rmdir unlink remove link symlink rename replace truncate chmod utime mkfifo"
BY_DESCRIPTOR = "write writev pwrite fsync fdatasync ftruncate posix_fallocate sendfile fchmod"
LOCKS = "flock lockf"  # of fcntl
FOREIGN = "renameat2 renamex_np syscall"  # of the C library, called by ctypes

CREATING = os.O_CREAT | os.O_TRUNC
# what fails from then on when a disk is full; names that were there before can be given again
TAKING_SPACE = {"open", "write", "writev", "pwrite", "mkdir", "symlink", "fsync", "fdatasync"}
TAKING_SPACE |= {"posix_fallocate", "sendfile"}
# what a file system may lack, and how that shows
LACKING = {"renameat2": errno.EINVAL, "flock": errno.ENOLCK}
_write, _getpid, _kill, _stat = os.write, os.getpid, os.kill, os.stat


class Faults:
    """What goes wrong in this process: one run's request, and how far the run has come."""

    def __init__(self, run: dict[str, Any], notes: int, meeting: mmap.mmap) -> None:
        self.folder = os.path.realpath(run["folder"])
        self.number = 0
        self._run, self._notes, self._meeting = run, notes, meeting
        self._pauses = random.Random(run["jitter"]) if run["jitter"] is not None else None

    def concerns(self, path: str | None) -> bool:
        return path is not None and (path + "/").startswith(self.folder + "/")

    def call(self, kind: str, path: str, call: Callable[[], Any], lacks: str | None = None) -> Any:
        """The N-th point: the call itself, and what is to happen before it and after it."""
        number, self.number = self.number, self.number + 1
        self.note(f"{kind} {path.removeprefix(self.folder)}")
        self._pause(kind)
        self._signal(number, "before")
        error, at = self._run["error"], self._run["at"]
        if error is not None:
            for_good = self._run["for_good"] and number > at and kind in TAKING_SPACE
            if number == at or for_good:
                raise OSError(error, os.strerror(error))
        try:
            if lacks is not None and lacks in self._run["lacking"]:
                raise OSError(LACKING[lacks], os.strerror(LACKING[lacks]))
            if kind == "fsync" and at >= 0:
                return None  # what the kernel has, a kill does not take away, and disks are slow
            return call()
        finally:
            self._signal(number, "after")

    def note(self, *lines: str) -> None:
        _write(self._notes, "".join(f"{line}\n" for line in lines).encode())

    def _signal(self, number: int, when: str) -> None:
        if self._run["signal"] is not None and (number, when) == (
            self._run["at"],
            self._run["when"],
        ):
            _kill(_getpid(), self._run["signal"])

    def _pause(self, kind: str) -> None:
        """With others: all meet where the writing ends; from then on each goes at random speed."""
        if self._pauses is None:
            return
        if kind == "fsync" and not self._meeting[self._run["place"]]:
            self._meeting[self._run["place"]] = 1
            end = time.monotonic() + 1
            while not all(self._meeting[: self._run["of"]]) and time.monotonic() < end:
                time.sleep(0.0005)
        elif self._meeting[self._run["place"]]:
            time.sleep(self._pauses.random() * 0.004)


active: Faults | None = None


def absolute(path: Any, folder: Any = None) -> str | None:
    """Of a path, perhaps relative to the descriptor of a folder, or of a descriptor."""
    if isinstance(path, int):
        try:
            return str(Path(f"/proc/self/fd/{path}").readlink())
        except OSError:
            return None
    base = Path.cwd() if folder in (None, -100) else Path(absolute(folder) or "")
    whole = base / os.fsdecode(path)
    # the last part may be a link, which is what is changed
    return str(whole.parent.resolve() / whole.name) if whole.name != ".." else str(whole.resolve())


def wrap(module: Any, name: str, *, fd: bool = False, lacks: str | None = None) -> None:
    real = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if active is None or (name == "open" and not _flags(args, kwargs) & CREATING):
            return real(*args, **kwargs)
        if fd:
            places = [absolute(getattr(args[0], "fileno", lambda: args[0])())]
        else:
            given = [one for one in args[:2] if isinstance(one, str | bytes | os.PathLike)]
            dirs = [kwargs.get("dir_fd", kwargs.get("src_dir_fd")), kwargs.get("dst_dir_fd")]
            places = [absolute(*pair) for pair in zip(given, dirs, strict=False)]
            places = places or [absolute(args[0])]
        inside = [place for place in places if place is not None and active.concerns(place)]
        if not inside:
            return real(*args, **kwargs)
        return active.call(name, inside[-1], lambda: real(*args, **kwargs), lacks)

    setattr(module, name, call)
    for ability in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in ability:
            ability.add(call)


def _flags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    flags: int = kwargs["flags"] if "flags" in kwargs else args[1]
    return flags


class Raw(io.FileIO):
    """A file whose writes are points."""

    def write(self, data: Any) -> int:
        return self._point("write", lambda: super(Raw, self).write(data))

    def truncate(self, size: int | None = None) -> int:
        return self._point("ftruncate", lambda: super(Raw, self).truncate(size))

    def _point(self, kind: str, call: Callable[[], int]) -> int:
        place = absolute(self.fileno()) or ""
        if active is None or not active.concerns(place):
            return call()
        number: int = active.call(kind, place, call)
        return number


def wrap_open() -> None:
    real = io.open

    def call(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        place = absolute(file) if active is not None and set(mode) & set("wxa+") else None
        if active is None or not active.concerns(place):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        plain = mode.replace("b", "").replace("t", "")

        def make() -> Raw:
            return Raw(file, plain, closefd, opener)

        raw = make() if isinstance(file, int) else active.call("open", place or "", make)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    builtins.open = io.open = call


class Foreign:
    """A function of the C library; in all but the call it is that function."""

    def __init__(self, name: str, function: Any) -> None:
        self.__dict__.update(_name=name, _function=function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)

    def __call__(self, *args: Any) -> Any:
        values = [getattr(one, "value", one) for one in args]
        texts = [i for i, one in enumerate(values) if isinstance(one, bytes | str | os.PathLike)]
        places = [absolute(values[i], values[i - 1] if i else None) for i in texts]
        inside = [p for p in places if p is not None and active is not None and active.concerns(p)]
        if active is None or not inside:
            return self._function(*args)
        kind = "renameat2" if self._name == "syscall" else self._name
        try:
            return active.call(kind, inside[-1], lambda: self._function(*args), "renameat2")
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1


def wrap_everything() -> None:
    for name in BY_PATH.split():
        wrap(os, name)
    for name in BY_DESCRIPTOR.split():
        wrap(os, name, fd=True)
    for name in LOCKS.split():
        wrap(fcntl, name, fd=True, lacks="flock")
    wrap_open()
    look_up = ctypes.CDLL.__getitem__

    def looked_up(library: ctypes.CDLL, name: Any) -> Any:
        found = look_up(library, name)
        return Foreign(name, found) if name in FOREIGN.split() else found

    ctypes.CDLL.__getitem__ = looked_up  # type: ignore[method-assign]


# ---- the server --------------------------------------------------------------------------------


def import_command() -> Callable[[list[str]], int]:
    """The command line; Typer reads all flags of all commands once, for all forks."""
    import typer.main

    from sewa_cli.cli import main
    from sewa_cli.cli.app import app

    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(app)
    return main


def import_too(names: Sequence[str]) -> None:
    """What a child had to import, the next one shall have: a point takes 50 ms, not a second."""
    for name in names:
        with suppress(Exception):  # a user's task, or a module with another name than its file's
            import_module(name)
    if names:
        gc.freeze()


def child(run: dict[str, Any], main: Callable[[list[str]], int], faults: Faults) -> int:
    """In the fork: the command, as a process of its own would run it."""
    global active
    os.chdir(run["cwd"])
    known, active = set(sys.modules), faults
    try:
        return main(run["argv"])
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        active = None
        faults.note(*(f"import {name}" for name in sys.modules if name not in known))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def start(
    run: dict[str, Any], main: Callable[[list[str]], int], meeting: mmap.mmap
) -> tuple[int, list[int]]:
    """Fork; the child's id, and where its stdout, stderr and notes are read."""
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid:
        for _, end in pipes:
            os.close(end)
        return pid, [start for start, _ in pipes]
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for (_, end), descriptor in zip(pipes[:2], (1, 2), strict=True):
            os.dup2(end, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        notes = os.dup2(pipes[2][1], 250)  # out of the way: a run has only its own files open
        os.closerange(3, notes)
        code = child(run, main, Faults(run, notes, meeting))
    finally:
        os._exit(code)


def collect(started: list[tuple[int, list[int]]], timeout: float) -> list[dict[str, Any]]:
    """What each wrote, until all have ended; who takes too long is killed and has code None."""
    texts = {descriptor: bytearray() for _, ends in started for descriptor in ends}
    end = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for descriptor in texts:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(max(0, end - time.monotonic())):
                data = os.read(key.fd, 2**16)
                texts[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
        late = bool(selector.get_map())
    answers = []
    for pid, ends in started:
        if late:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, err, notes = (texts[one].decode(errors="replace") for one in ends)
        for descriptor in ends:
            os.close(descriptor)
        lines = notes.splitlines()
        import_too([line.split()[1] for line in lines if line.startswith("import ")])
        points = [line for line in lines if not line.startswith("import ")]
        answers.append({"code": None if late else code, "out": out, "err": err, "points": points})
    return answers


def serve() -> None:
    wrap_everything()
    sys.dont_write_bytecode = True
    gc.disable()
    main = import_command()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        runs = request["runs"]
        meeting = mmap.mmap(-1, 4096)
        started = [
            start({**run, "place": place, "of": len(runs)}, main, meeting)
            for place, run in enumerate(runs)
        ]
        answers.write(json.dumps(collect(started, request["timeout"])) + "\n")
        answers.flush()
        meeting.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve()
