"""Jobs done in several processes, or in this one.

Each process is a fresh Python that imports nothing of ours but `worker`: neither CUDA nor MuJoCo
survives a fork, and a program that is started again from its `__main__` may not be made for that.
It leads a process group: Ctrl-C does not reach it, and when it is killed, all that the user's code
has started goes with it. A thread talks to it, so that nothing here ever waits for a pipe.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Thread
from typing import IO, Any, Literal, cast

from torch import Tensor

from sewa_cli import interrupts
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.session.jobs import Failure, Job, Kind, Places, Recipe, Result, outcome
from sewa_cli.session.worker import HELLO, START
from sewa_cli.task.scoring import Score

__all__ = ["Failure", "InProcess", "Job", "Kind", "Places", "Recipe", "Result", "Workers"]

READY = 600.0  # seconds for a process to import the task, build the model and list the parts
GRACE = 2.0  # for one that is told to end
TICK = 1.0
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
GONE = object()


class InProcess:
    """One job after the other, here; so none can be given up when it takes too long."""

    def __init__(self, evaluate: Callable[[Job], list[Score]]) -> None:
        self._evaluate = evaluate

    def run(self, jobs: Sequence[Job], until: float | None = None) -> Iterator[tuple[int, Result]]:
        """Each job's index and result; none is begun once the clock is past `until`."""
        for index, job in enumerate(jobs):
            if until is not None and time.monotonic() > until:
                return
            interrupts.stop_if_interrupted()  # the user's code may have swallowed it
            yield index, outcome(self._evaluate, job)

    def warm(self) -> None: ...

    def close(self) -> None: ...


class Workers:
    """The same in `count` processes, started when they are needed, each with its own model.

    A job that takes longer than `timeout` seconds for each of its parts has failed, and so has one
    whose process dies; another takes that one's place.
    """

    def __init__(self, recipe: Recipe, count: int, timeout: float | None) -> None:
        try:
            self._recipe = pickle.dumps(recipe)
        except Exception as error:
            raise ConfigError(
                f"workers: args cannot be sent to another process: {error}"
            ) from error
        self._count = count
        self._timeout = inf if timeout is None else timeout
        self._workers: list[_Worker] = []
        self._heard: SimpleQueue[tuple[_Worker, Any]] = SimpleQueue()

    def run(self, jobs: Sequence[Job], until: float | None = None) -> Iterator[tuple[int, Result]]:
        """As they finish; what is under way when the clock is past `until` is given up."""
        left, under_way = [*range(len(jobs))], dict[_Worker, int]()
        try:
            while left or under_way:
                if until is not None and time.monotonic() > until:
                    return
                self._start(min(self._count, len(left) + len(under_way)))
                for worker in [w for w in self._workers if w.state == "idle"][: len(left)]:
                    under_way[worker] = index = self._next(worker, jobs, left)
                    left.remove(index)
                    job = jobs[index]
                    worker.begin(job, self._timeout * len(job.parts))
                for worker, answer in self._hear(until):
                    if worker in under_way:
                        yield under_way.pop(worker), answer
        finally:
            for worker in under_way:
                self._kill(worker)

    def _next(self, worker: _Worker, jobs: Sequence[Job], left: Sequence[int]) -> int:
        """Prefer weights that this worker has, then those that no other has: few are sent twice."""
        others = [other for other in self._workers if other is not worker]

        def cost(index: int) -> tuple[bool, bool]:
            job = jobs[index]
            return not worker.has(job.weights), any(other.has(job.weights) for other in others)

        return min(left, key=cost)

    def warm(self) -> None:
        """Have them ready: what it takes to start them is no measure of what a part takes."""
        self._start(self._count)
        while any(worker.state == "starting" for worker in self._workers):
            for _ in self._hear(None):
                pass

    def close(self) -> None:
        idle = [worker for worker in self._workers if worker.state == "idle"]
        for worker in idle:
            worker.tell_to_end()
        end = time.monotonic() + GRACE
        with suppress(TimeoutExpired):
            for worker in idle:
                worker.process.wait(max(0.0, end - time.monotonic()))
        for worker in [*self._workers]:
            self._kill(worker)

    def _start(self, wanted: int) -> None:
        for worker in [*self._workers]:
            if worker.state == "idle" and worker.process.poll() is not None:
                self._kill(worker)  # has died, and no job is to blame
        while len(self._workers) < wanted:
            try:
                self._workers.append(_Worker(self._recipe, self._heard))
            except OSError as error:
                raise ConfigError(f"workers: no process can be started: {error}") from error

    def _kill(self, worker: _Worker) -> str:
        """What it died of."""
        self._workers.remove(worker)
        return worker.kill()

    def _hear(self, until: float | None) -> Iterator[tuple[_Worker, Result]]:
        """Waits for a while; results that there are then, if any."""
        soonest = min([inf if until is None else until, *(w.deadline for w in self._workers)])
        try:
            wait = min(max(soonest - time.monotonic(), 0.0), TICK)
            worker, answer = self._heard.get(timeout=wait)
        except Empty:
            yield from self._find_late()
            return
        if worker not in self._workers:
            return  # it was killed before it could be heard
        if isinstance(answer, Exception):
            self._kill(worker)
            raise answer
        if answer is GONE:
            yield worker, self._lost(worker)
            return
        is_result = worker.state == "busy"
        worker.state, worker.deadline = "idle", inf
        if is_result:
            yield worker, answer

    def _find_late(self) -> Iterator[tuple[_Worker, Result]]:
        for worker in [*self._workers]:
            if worker.is_silent:
                yield worker, self._lost(worker)
            elif time.monotonic() > worker.deadline:
                self._kill(worker)
                if worker.state == "starting":
                    raise TaskError(
                        f"a worker was not ready after {READY:g} s: importing the task, "
                        "build_model() or the list of parts hangs"
                    )
                yield worker, Failure(f"took longer than {worker.limit:g} s", is_task=False)

    def _lost(self, worker: _Worker) -> Failure:
        cause = self._kill(worker)
        if worker.state == "starting":
            raise TaskError(f"a worker could not be started: {cause}; ask for fewer of them")
        return Failure(cause, is_task=False)


class _Worker:
    """A process, and the thread that talks to it; its answers are put into `heard`."""

    def __init__(self, recipe: bytes, heard: SimpleQueue[tuple[_Worker, Any]]) -> None:
        self.process = Popen(
            [sys.executable, "-c", START, *sys.path],
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, **dict.fromkeys(THREADS, "1"), **KEEP_MEMORY},
            start_new_session=True,
        )
        self.state: Literal["starting", "idle", "busy"] = "starting"
        self.limit = READY  # seconds for what it is at
        self.deadline = time.monotonic() + READY
        self._held: tuple[Tensor, int] | None = None  # the weights that it has, as they were
        self._heard = heard
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._requests.put(recipe)
        self._thread = Thread(target=self._talk, daemon=True)
        self._thread.start()

    def begin(self, job: Job, limit: float) -> None:
        self.state, self.limit, self.deadline = "busy", limit, time.monotonic() + limit
        weights = None if self.has(job.weights) else job.weights.detach().contiguous().numpy()
        self._held = job.weights, job.weights._version  # torch counts changes in place
        self._requests.put((weights, job.kind, job.parts))

    def has(self, weights: Tensor) -> bool:
        if self._held is None:
            return False
        return self._held[0] is weights and self._held[1] == weights._version

    def tell_to_end(self) -> None:
        self._requests.put(None)

    def kill(self) -> str:
        """Whatever it is at. Returns what it had died of."""
        self._kill_group()
        with suppress(TimeoutExpired):  # a disk or a driver may keep it for longer
            self.process.wait(GRACE)
        self._requests.put(None)  # for the thread, which may be waiting for a request
        self._thread.join(GRACE)
        if not self._thread.is_alive():
            for stream in (self.process.stdin, self.process.stdout):
                with suppress(OSError):
                    cast(IO[bytes], stream).close()
        code = self.process.returncode
        if code is None or code >= 0:
            return f"the process ended with exit code {code}"
        why = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"the process was killed (signal {-code}){why}"

    def _kill_group(self) -> None:
        if hasattr(os, "killpg"):
            with suppress(OSError):  # they are all gone
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    @property
    def is_silent(self) -> bool:
        """Whether it is dead, and its pipe held open by what the user's code has started."""
        if self.process.poll() is None:
            return False
        self._kill_group()
        self._thread.join(TICK)
        return self._thread.is_alive()

    def _talk(self) -> None:
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        try:
            for line in answers:
                if line == HELLO:
                    break
            while True:
                request = self._requests.get()
                pickle.dump(request, requests, protocol=5)
                requests.flush()
                if request is None:
                    return
                self._heard.put((self, pickle.load(answers)))
        except Exception:  # a closed pipe, half an answer
            self._heard.put((self, GONE))
