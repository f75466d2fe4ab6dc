"""Run the user's command on checkpoints, several at a time, each in a process group of its own.

There is no shell: the words are split once and each placeholder stays inside its word. Whoever
wants a shell writes a script.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from shlex import split
from typing import Final, NamedTuple, TypeVar

from sewa_cli import interrupts
from sewa_cli.errors import ConfigError
from sewa_cli.files import MIB
from sewa_cli.solvers.board import Failed
from sewa_cli.text import one_line

CHUNK: Final = 2**16
TAIL: Final = 2**16  # bytes of standard error that are kept
MOST: Final = 256 * MIB  # of standard output
GRACE: Final = 2.0  # seconds to end before it is killed
LEFT_OPEN: Final = 5.0  # seconds for what the command has printed, once it has ended
TICK: Final = 0.2
PLACE: Final = re.compile(r"\{(checkpoint|part|worker)\}")


class Call(NamedTuple):
    checkpoint: Path
    part: str = ""


def words_of(command: str) -> list[str]:
    """Split a command; refuse it if it could not be run."""
    try:
        words = split(command)
    except ValueError as error:
        raise ConfigError(f"score: {command:.200}: {error}") from error
    if not words:
        raise ConfigError("score: the command is empty")
    if shutil.which(words[0]) is None:
        is_file = Path(words[0]).is_file()
        what = f"is not executable; chmod +x {words[0]}" if is_file else "no such command"
        raise ConfigError(f"score: {words[0]}: {what}")
    return words


J = TypeVar("J")
R = TypeVar("R")


def as_they_end(
    jobs: Iterable[J],
    begin: Callable[[J], Future[R]],
    size: int,
    under_way: dict[Future[R], tuple[int, J]],
    until: float | None,
) -> Iterator[tuple[int, J, Future[R]]]:
    """Keep `size` jobs under way; yield each with its place; begin none after `until`."""
    queue = enumerate(jobs)
    while until is None or time.monotonic() <= until:
        for index, job in islice(queue, size - len(under_way)):
            under_way[begin(job)] = index, job
        if not under_way:
            return
        left = None if until is None else max(0.0, until - time.monotonic())
        for future in wait(under_way, left, FIRST_COMPLETED).done:
            yield *under_way.pop(future), future
        interrupts.stop_if_interrupted()


class Commands:
    """Runs the command for `workers` calls at a time; each has a number of its own, from 0."""

    def __init__(self, words: Sequence[str], workers: int, timeout: float | None) -> None:
        self._words, self._size, self._timeout = words, workers, timeout
        self._pool = ThreadPoolExecutor(workers)
        self._free = SimpleQueue[int]()
        for number in range(workers):
            self._free.put(number)
        self._is_ended = False

    def run(
        self, calls: Iterable[Call], until: float | None = None
    ) -> Iterator[tuple[int, str | Failed]]:
        """Yield what each has printed, as they end; all under way end when this does."""
        under_way = dict[Future[str | Failed], tuple[int, Call]]()
        self._is_ended = False
        try:
            for index, _, future in as_they_end(calls, self._begin, self._size, under_way, until):
                yield index, future.result()
        finally:
            self._is_ended = True
            wait(under_way)

    def close(self) -> None:
        self._pool.shutdown()

    def _begin(self, call: Call) -> Future[str | Failed]:
        return self._pool.submit(self._run, call)

    def _run(self, call: Call) -> str | Failed:
        worker = self._free.get()
        try:
            return self._call(call, worker)
        finally:
            self._free.put(worker)

    def _call(self, call: Call, worker: int) -> str | Failed:
        values = {"checkpoint": str(call.checkpoint), "part": call.part, "worker": str(worker)}
        words = [PLACE.sub(lambda found: values[found[1]], word) for word in self._words]
        environment = {f"SEWA_{name.upper()}": value for name, value in values.items()}
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            return Failed(f"{words[0]}: {error.strerror}", is_final=True)
        try:
            return self._listen(process)
        finally:
            if process.poll() is None:
                end_group(process.pid, signal.SIGTERM)  # it may have files to remove
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                end_group(process.pid)
                process.wait()

    def _listen(self, process: subprocess.Popen[bytes]) -> str | Failed:
        printed, said, size = list[bytes](), b"", 0
        end = None if self._timeout is None else time.monotonic() + self._timeout
        has_ended = False
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
            for stream in (process.stdout, process.stderr):
                selector.register(stream, selectors.EVENT_READ)
            while not (has_ended and not selector.get_map()):
                if self._is_ended:
                    return Failed("interrupted")
                is_closed = not selector.get_map()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TICK if is_closed else 0)
                for key, _ in selector.select(0 if is_closed else TICK):
                    chunk = os.read(key.fd, CHUNK)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        said = (said + chunk)[-TAIL:]
                    else:
                        printed.append(chunk)
                        size += len(chunk)
                if size > MOST:
                    return Failed(f"it prints more than {MOST // MIB} MiB on standard output")
                if not has_ended and process.poll() is not None:
                    has_ended = True
                    end_group(process.pid)  # what it has left behind
                    end = time.monotonic() + LEFT_OPEN
                if end is not None and time.monotonic() > end:
                    if has_ended:
                        break
                    return Failed(f"took longer than {self._timeout:g} s")
        if process.returncode != 0:
            return Failed(f"it {cause(process.returncode)}{_last_line(said)}")
        return b"".join(printed).decode(errors="replace")


def _last_line(said: bytes) -> str:
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return f": {one_line(lines[-1].strip())[:300]}" if lines else ", and nothing on standard error"


def cause(code: int) -> str:
    """Say what a process died of."""
    if code >= 0:
        return f"ended with exit code {code}"
    why = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
    return f"was killed (signal {-code}){why}"


def end_group(leader: int, number: int = signal.SIGKILL) -> None:
    with suppress(OSError, AttributeError):  # it has ended; a system without groups
        os.killpg(leader, number)
