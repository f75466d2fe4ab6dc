"""Jobs done in this process, or in several.

`pebble` keeps the processes: it times each job, and replaces a process that hangs or dies. They
are started afresh, since neither CUDA nor MuJoCo survives a fork.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from pebble import ProcessExpired, ProcessPool
from torch import Tensor

from sewa_cli import interrupts
from sewa_cli.errors import ConfigError, OutputError, TaskError
from sewa_cli.scoring.command import as_they_end, cause, end_group
from sewa_cli.scoring.jobs import Job, PartScorer, Result, WorkerRecipe
from sewa_cli.solvers.board import Failed

READY = 600.0  # seconds for a process to import the task, build the model and list the parts
TICK = 0.5


class InProcess:
    """Does one job after the other, here; none can be given up when it takes too long."""

    def __init__(self, scorer: PartScorer) -> None:
        self._scorer = scorer

    def store(self, weights: Tensor) -> Tensor:
        return weights.clone()

    def discard(self, stored: Tensor | Path) -> None: ...

    def run(self, jobs: Iterable[Job], until: float | None = None) -> Iterator[tuple[int, Result]]:
        """Yield each job's index and result; begin none once the clock is past `until`."""
        for index, job in enumerate(jobs):
            if until is not None and time.monotonic() > until:
                return
            interrupts.stop_if_interrupted()  # the user's code may have swallowed it
            yield index, self._scorer.try_score(job)

    def warm(self) -> None: ...

    def close(self) -> None: ...


class Workers:
    """Does jobs in `size` processes, each with its own model.

    A job that takes longer than `timeout` seconds for each of its parts has failed, and so has one
    whose process dies. Weights are written to a file once, for all jobs that need them.
    """

    def __init__(self, recipe: WorkerRecipe, size: int, timeout: float | None) -> None:
        self._recipe, self._size, self._timeout = recipe, size, timeout
        self._pool: ProcessPool | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="sewa-")
        self._numbers = count()

    def store(self, weights: Tensor) -> Path:
        path = Path(self._folder.name, str(next(self._numbers)))
        try:
            weights.numpy().tofile(path)
        except OSError as error:
            raise OutputError(
                f"workers: {path.parent}: {error}; set TMPDIR to another folder"
            ) from error
        return path

    def discard(self, stored: Tensor | Path) -> None:
        if isinstance(stored, Path):
            stored.unlink(missing_ok=True)

    def run(self, jobs: Iterable[Job], until: float | None = None) -> Iterator[tuple[int, Result]]:
        """Yield results as they come; what is under way when the clock is past `until` ends."""
        under_way: dict[Future[Result], tuple[int, Job]] = {}
        try:
            # no more than there are processes: pebble ends a process to cancel its job
            for index, job, future in as_they_end(jobs, self._begin, self._size, under_way, until):
                yield index, self._result(future, job)
        finally:
            for future in under_way:
                future.cancel()

    def _begin(self, job: Job) -> Future[Result]:
        limit = None if self._timeout is None else self._timeout * len(job.parts)
        future: Future[Result] = self._open().schedule(_score, (job,), timeout=limit)
        return future

    def _result(self, future: Future[Result], job: Job) -> Result:
        try:
            return future.result()
        except ProcessExpired as error:
            end_group(error.pid)
            return Failed(f"the process {cause(error.exitcode)}")
        except BrokenProcessPool:  # all have ended; `_open` starts others
            return Failed("the process ended")
        except TimeoutError:
            assert self._timeout is not None
            return Failed(f"took longer than {self._timeout * len(job.parts):g} s")

    def warm(self) -> None:
        """Have all processes ready: their start is no measure of what a part takes."""
        self._open()

    def _open(self) -> ProcessPool:
        """Return a pool whose processes are ready; another where one broke while it was idle."""
        if self._pool is not None and self._pool.active:
            return self._pool
        self._stop()
        try:
            recipe = pickle.dumps(self._recipe)
        except Exception as error:
            raise ConfigError(
                f"workers: args cannot be sent to another process: {error}"
            ) from error
        context = get_context("spawn")
        ready = context.Semaphore(0)
        about = recipe, self._folder.name, ready
        self._pool = ProcessPool(self._size, 0, _start, about, context)
        end = time.monotonic() + READY
        try:
            with _interrupts_blocked():  # which processes inherit: Ctrl-C is for us to answer
                is_active = self._pool.active
            for _ in range(self._size):
                while is_active and not ready.acquire(timeout=TICK):
                    is_active = self._pool.active and time.monotonic() < end
        except BrokenProcessPool:
            is_active = False
        if not is_active:
            raise TaskError("workers: a process could not be started; ask for fewer")
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a worker's process -------------------------------------------------------------------

_scorer: PartScorer | Exception | None = None  # of this process


def _start(recipe: bytes, folder: str, ready: Any) -> None:
    """Open what jobs need. An exception is kept for the first job, which reports it."""
    global _scorer
    os.dup2(2, 1)  # what the user's code prints
    sys.stdout = sys.stderr
    if hasattr(os, "setsid"):
        os.setsid()  # a group, which ends with all that the user's code has started
        signal.signal(signal.SIGTERM, _end_own_group)
    Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        _scorer = pickle.loads(recipe).open()
    except Exception as error:
        _scorer = error
    ready.release()


def _end_own_group(*_: object) -> None:
    end_group(0)
    os._exit(1)


def _end_with_parent(folder: str) -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # the weights, if the parent was killed
    _end_own_group()


def _score(job: Job) -> Result:
    if isinstance(_scorer, Exception):
        raise _scorer
    assert _scorer is not None
    return _scorer.try_score(job)
