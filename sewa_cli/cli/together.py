"""Several ranks as one command: with one voice, and ended together.

A rank that fails posts its fault on the board that torchrun's own store is, and the others end with
the same exit code. One that was killed can post nothing: its process is gone, or its beat missed.
Whoever is first on the board is the cause, and says the one line; for a rank that cannot, the
launcher does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from sewa_cli import interrupts, ranks

FAULT = "fault"  # on the board, and for our launcher the name of a file
MET = "met"  # for our launcher, a file: from here on whoever speaks of a fault posts it first
KILLED = 128 + signal.SIGKILL  # as a shell says it
TICK = 0.5  # seconds
GRACE = 4  # ticks for a rank to end by itself, when another has failed
MISSED = 30  # ticks without a beat, of a rank on another host
_CUT_OFF = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I)


# ---- one voice ---------------------------------------------------------------------------------

_voice = 2  # the descriptor that reaches the user


def join(verbose: bool) -> None:
    """Be one of torchrun's ranks, if it has started us; all but the first fall silent.

    `verbose`: what the user's code prints on the others is shown, with their number.
    """
    global _voice
    if ranks.are_several():
        _end_when_told()
    here = ranks.join()
    if not here.several:
        return
    if here.rank > 0:
        _voice = os.dup(2)
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, 1)
        if verbose:
            labelled = _labelled(f"rank {here.rank}: ")
            os.dup2(labelled, 2)
            os.close(labelled)
        else:
            os.dup2(void, 2)
    _Watch(here).start()
    import torch.distributed.fsdp  # noqa: F401  # seconds, before any clock is started


def _end_when_told() -> None:
    """Python answers a signal between two of its steps; who waits for another rank has none."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while os.read(reading, 1)[0] not in interrupts.NUMBERS:
            pass
        code = interrupts.CODE
        with suppress(Exception):  # the board is gone
            if _Watch.now is not None:
                code = _ended_by_others(_Watch.now, code, ())
        time.sleep(GRACE * TICK)
        os._exit(code)

    threading.Thread(target=wait, daemon=True, name="told").start()


def _labelled(label: str) -> int:
    """A descriptor; each line that is written to it reaches the user with this before it."""
    reading, writing = os.pipe()

    def pass_on() -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                _write(label + line)

    threading.Thread(target=pass_on, daemon=True, name="label").start()
    return writing


def _let_all_be_heard() -> None:
    """What was printed before the end, which is not waited for otherwise."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # whatever the user has put there
            stream.flush()
    for thread in threading.enumerate():
        if thread.name == "label":  # it ends when nobody can write to it any more
            void = os.open(os.devnull, os.O_WRONLY)
            os.dup2(void, 1)
            os.dup2(void, 2)
            thread.join(2.0)


def say(line: str) -> None:
    _write(f"{line}\n")


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(_voice, text.encode(errors="replace"))


# ---- ended together ----------------------------------------------------------------------------


class _Board:
    """Where ranks post what has happened: a connection of our own to torchrun's store."""

    def __init__(self) -> None:
        from torch import distributed as torch_distributed

        distributed: Any = torch_distributed
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=20)
        store = distributed.TCPStore(address, port, is_master=False, timeout=timeout)
        self._store = distributed.PrefixStore("sewa", store)
        self._lock = threading.Lock()

    def post(self, key: str, value: Any) -> None:
        with self._lock:
            self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        with self._lock:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def first(self, key: str, value: Any) -> bool:
        """Whether nobody has posted this before."""
        text = json.dumps(value)
        with self._lock:
            return bool(self._store.compare_set(key, "", text) == text.encode())

    def claim(self, rank: int, code: int, said: bool = False) -> bool:
        """Whether this rank is the cause: nobody has named one before."""
        fault = {"rank": rank, "code": code, "said": said}
        if not self.first(FAULT, fault):
            return False
        if interrupts.LAUNCHED in os.environ:
            Path(os.environ[interrupts.LAUNCHED], FAULT).write_text(json.dumps(fault))
        return True


class _Watch(threading.Thread):
    """Looks whether the other ranks are there, and ends this one when they are not."""

    now: _Watch | None = None

    def __init__(self, here: ranks.Ranks) -> None:
        super().__init__(daemon=True, name="watch")
        self.here, self.board, self.over = here, _Board(), threading.Event()
        self._parent = os.getppid()
        self._beats: dict[int, tuple[Any, int]] = {}
        self._where: dict[int, Any] = {}
        self.board.post(f"at {here.rank}", [socket.gethostname(), os.getpid()])
        if interrupts.LAUNCHED in os.environ:
            Path(os.environ[interrupts.LAUNCHED], MET).touch()
        _Watch.now = self

    def run(self) -> None:
        beat = seen = 0
        while not self.over.wait(TICK):
            beat += 1
            try:
                self.board.post(f"beat {self.here.rank}", beat)
                found = self.board.read(FAULT) or self.lost()
            except Exception:  # the store has gone, and with it whoever held it
                found = found_gone()
            if os.getppid() != self._parent:
                os._exit(KILLED)
            if found is None or self.over.is_set():
                continue
            seen += 1
            if seen > GRACE:
                os._exit(found["code"])

    def lost(self) -> Any:
        """A rank that is there no more; told by whoever finds it first."""
        for rank in range(self.here.size):
            if rank == self.here.rank or self.board.read(f"done {rank}"):
                continue
            if self._is_gone(rank):
                if self.board.claim(rank, KILLED) and interrupts.LAUNCHED not in os.environ:
                    _write(
                        f"error: rank {rank} was killed, has ended by itself or has lost its "
                        "connection; nothing was written\n"
                    )
                return self.board.read(FAULT)
        return None

    def _is_gone(self, rank: int) -> bool:
        where = self._where.get(rank) or self.board.read(f"at {rank}")
        if where is None:  # it has not come yet
            return False
        self._where[rank] = where
        host, process = where
        if host == socket.gethostname():
            return _is_dead(process)
        beat = self.board.read(f"beat {rank}")
        last, missed = self._beats.get(rank, (None, 0))
        self._beats[rank] = (beat, missed + 1 if beat == last else 0)
        return self._beats[rank][1] > MISSED


def found_gone() -> dict[str, int]:
    return {"code": KILLED}


def _is_dead(process: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def leave() -> None:
    """All is well, and done: nobody is missed from now on."""
    watch = _Watch.now
    if watch is not None:
        watch.board.post(f"done {watch.here.rank}", True)
        watch.over.set()
        watch.join()  # a thread that is inside of the store when Python ends would abort it
        _Watch.now = None


def fail(error: BaseException, code: int, lines: Sequence[str]) -> int:
    """This rank ends with these lines: one rank says them, and the others end too."""
    interrupts.ignore()  # whoever ends first has the launcher tell the others to
    _let_all_be_heard()
    watch = _Watch.now
    if watch is None:
        for line in lines:
            _write(line)
        return code
    board, rank = watch.board, watch.here.rank
    try:
        if is_cut_off(error) or code == interrupts.CODE:
            return _ended_by_others(watch, code, lines)
        board.post(f"fault {rank}", lines)
        if not board.claim(rank, code, said=True):
            return int(board.read(FAULT)["code"])
        _tell_once(watch, code, lines)
    except Exception:  # the board is gone: say it anyway
        for line in lines:
            _write(line)
    return code


def _tell_once(watch: _Watch, code: int, lines: Sequence[str]) -> None:
    """What all ranks say is the command's own fault, and names none of them."""
    others = [r for r in range(watch.here.size) if r != watch.here.rank]
    said: list[Any] = []
    for _ in range(GRACE):
        said = [watch.board.read(f"fault {rank}") for rank in others]
        if all(one is not None for one in said):
            break
        time.sleep(TICK / 2)
    ours = watch.here.rank == 0 and code in (2, 3, 5)  # files and flags are read by the first
    named = not ours and any(one != list(lines) for one in said)
    for line in lines:
        begin = "error: "
        if named and line.startswith(begin):
            line = f"{begin}rank {watch.here.rank}: {line.removeprefix(begin)}"
        _write(line)


def _ended_by_others(watch: _Watch, code: int, lines: Sequence[str]) -> int:
    """Cut off, or told to end: whoever was the cause says so, or is found missing."""
    board, here, told = watch.board, watch.here, code == interrupts.CODE
    if told:
        board.post(f"told {here.rank}", True)
    for _ in range(2 if told else 4 * GRACE):
        time.sleep(TICK / 2)
        found = board.read(FAULT) or watch.lost()
        if found is not None:
            return int(found["code"])
    if not board.claim(here.rank, code):
        return int(board.read(FAULT)["code"])
    if told:
        all_of_us = all(board.read(f"told {rank}") for rank in range(here.size))
        line = f"error: rank {here.rank} was told to end; nothing was written"
        lines = [f"{interrupts.LINE if all_of_us else line}\n"]
        lines = [] if interrupts.LAUNCHED in os.environ else lines
    for line in lines:
        _write(line)
    return code


def is_cut_off(error: BaseException | None) -> bool:
    """Tell whether torch.distributed raised this because another rank is gone.

    The user's code may raise an error with the same words: the place it was raised in decides.
    """
    while error is not None:
        if type(error).__name__.startswith("Dist") or (
            isinstance(error, RuntimeError)
            and _CUT_OFF.search(str(error))
            and _raised_in(error).startswith("torch.distributed")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _raised_in(error: BaseException) -> str:
    """Return the name of the module whose code raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""
