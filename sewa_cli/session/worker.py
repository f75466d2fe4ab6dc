"""The process of a worker: makes task and model anew, then does one job after the other.

Requests come in on what was its standard input, answers leave by what was its standard output; all
that prints goes to standard error. It is not there for longer than whoever has started it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

HELLO = b"sewa: here begin the answers\n"  # what Python itself prints at its start comes before
START = "import sys; sys.path[:] = sys.argv[1:]; from sewa_cli.session.worker import main; main()"
PR_SET_PDEATHSIG = 1  # of prctl.h


def main() -> None:
    del sys.argv[1:]
    requests, answers = _streams()
    _end_with_parent()
    _warn_once()
    answers.write(b"\n" + HELLO)
    answers.flush()

    def answer(value: Any) -> None:
        pickle.dump(value, answers)
        answers.flush()

    try:
        recipe = pickle.loads(pickle.load(requests))
        import torch

        from sewa_cli.session.jobs import Job, open_examiner, outcome

        jobs: SimpleQueue[Any] = SimpleQueue()
        Thread(target=_listen, args=(requests, jobs), daemon=True).start()
        examiner = open_examiner(recipe)
        answer(None)
        weights = torch.empty(0)
        while (request := jobs.get()) is not None:
            sent, kind, parts = request
            weights = weights if sent is None else torch.from_numpy(sent)
            answer(outcome(examiner.evaluate, Job(weights, kind, parts)))
    except Exception as error:
        answer(_as_sent(error))


def _streams() -> tuple[IO[bytes], IO[bytes]]:
    """For requests and answers; a process that the user's code forks has neither."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    void = os.open(os.devnull, os.O_RDWR)
    os.dup2(void, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    if hasattr(os, "register_at_fork"):

        def let_go() -> None:
            for stream in (requests, answers):
                os.dup2(void, stream.fileno(), inheritable=False)

        os.register_at_fork(after_in_child=let_go)
    return requests, answers


def _listen(requests: IO[bytes], jobs: SimpleQueue[Any]) -> None:
    """In a thread of its own, so that the end of file is noticed in the middle of a job."""
    with suppress(Exception):  # of half a request, too
        while (request := pickle.load(requests)) is not None:
            jobs.put(request)
        jobs.put(None)
        return
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and with it all that the user's code has started
    os._exit(1)


def _end_with_parent() -> None:
    """Ctrl-C is the parent's to answer; its end is ours, even while C code holds Python's lock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        from ctypes import CDLL

        with suppress(OSError, AttributeError):
            CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # where memory runs out, a worker can be replaced, its parent not


def _warn_once() -> None:
    """Each warning, however many parts bring it up; libraries reset what Python has seen."""
    seen: set[tuple[type[Warning], str]] = set()
    show = warnings.showwarning

    def once(message: Warning | str, category: type[Warning], *where: Any, **others: Any) -> None:
        if (key := (category, str(message))) not in seen:
            seen.add(key)
            show(message, category, *where, **others)

    warnings.showwarning = once


def _as_sent(error: Exception) -> Exception:
    """With its traceback as a note; as another where it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.add_note(error.__notes__[-1])
        return other
    return error
