"""Parts scored in several processes: the same numbers, whatever happens to one of them."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from helpers.shells import environment
from helpers.tiny import train_tiny
from torch import Tensor

from sewa_cli.config import Config
from sewa_cli.errors import TaskError, UserCodeError
from sewa_cli.session import workers as pool
from sewa_cli.session.jobs import open_examiner
from sewa_cli.session.workers import Failure, InProcess, Job, Places, Recipe, Result, Workers

pytestmark = pytest.mark.filterwarnings("ignore:careful")  # of score(), in this process
# how score() is to behave, part by part; the first eight give numbers
TASK = """
import ctypes, os, pathlib, random, signal, subprocess, sys, time, warnings
import numpy as np
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def score_parts():
    ill = ["raise", "word", "exit", "kill", "crash", "hang", "train", "quit", "hold"]
    return 8 * ["draw"] + ill

def heldout_parts():
    return 3 * ["draw"]

def score(model, part):
    print("a word of the user's")
    with warnings.catch_warnings():  # after which Python forgets what it has shown
        pass
    warnings.warn("careful")
    if part == "raise":
        raise ValueError("no such level")
    if part == "word":
        return "good"
    if part == "exit":
        os._exit(3)
    if part == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "crash":
        ctypes.string_at(0)
    if part == "hang":
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (HERE / f"hangs-{os.getpid()}").write_text(str(other.pid))
        time.sleep(600)
    if part == "hold":
        (HERE / f"hangs-{os.getpid()}").write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(600)  # with Python's lock
    if part == "train":
        model.train()
        raise ValueError("in the middle")
    if part == "quit":
        sys.exit(7)
    outputs = model(torch.randn(50, 6)).double()
    return {
        "drawn": random.random() + np.random.rand() + float(torch.rand(1)),
        "mean": outputs.mean(),
        "pid": 0 * os.getpid(),
    }
"""
DRAWS, RAISE, WORD, EXIT, KILL, CRASH, HANG, TRAIN, QUIT, HOLD = (range(8), *range(8, 17))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "task.py").write_text(TASK)
    *_, newest = train_tiny(tmp_path / "ckpts", k=2)
    config = Config(task=str(tmp_path / "task.py"), checkpoints=(newest,), device="cpu", seed=5)
    places = {"selection": Places("selection", range(17)), "heldout": Places("heldout", (2, 0))}
    lists = {"selection": None, "heldout": None}
    return Recipe(config, newest, {}, "cpu", places, lists)  # type: ignore[arg-type]


def weights(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(146, generator=generator) for _ in range(count)]


def jobs_of(*parts: int) -> list[Job]:
    return [Job(weights(1)[0], "selection", (part,)) for part in parts]


def pids_of(workers: Workers) -> list[int]:
    """Of the processes and all that these have started."""
    own = [psutil.Process(worker.process.pid) for worker in workers._workers]
    return [process.pid for one in own for process in (one, *one.children(recursive=True))]


def assert_gone(pids: list[int], within: float = 5.0) -> None:
    end = time.monotonic() + within
    while left := [pid for pid in pids if psutil.pid_exists(pid) and is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_do_not_depend_on_who_works_nor_on_what_fails(
    recipe: Recipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examiner = open_examiner(recipe)
    first, second = weights(2)
    jobs = [Job(one, "selection", (part,)) for one in (first, second) for part in DRAWS]
    jobs += [Job(first, "selection", (0, 1, 2)), Job(second, "heldout", (1, 0))]
    state = torch.get_rng_state()
    alone = dict(InProcess(examiner.evaluate).run(jobs))
    assert torch.equal(torch.get_rng_state(), state)
    assert alone[16] == [alone[part][0] for part in range(3)]
    drawn = [found[0]["drawn"] for found in alone.values() if isinstance(found, list)]
    assert len(set(drawn[:8])) == 8  # each part has its own seed
    assert drawn[:8] == drawn[8:16]  # and every average is judged by the same draws
    assert drawn[17] not in drawn[:8]  # of the held-out parts, the first in their list
    capfd.readouterr()
    with closing(Workers(recipe, 2, 60.0)) as workers:
        for index, job in enumerate(jobs):  # as few processes as there are jobs
            assert list(workers.run([job])) == [(0, alone[index])]
        assert len(workers._workers) == 1
        assert dict(workers.run(jobs)) == alone
        assert len(workers._workers) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("a word of the user's") == 2 * 21  # parts
        assert 1 <= err.count("UserWarning: careful") <= 2

        # weights are sent once for each average, and again where one worker helps the other
        sent, dump = [], pickle.dump
        with monkeypatch.context() as patched:
            patched.setattr(
                pool.pickle, "dump", lambda it, to, **how: (sent.append(it), dump(it, to, **how))
            )
            turns = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13]
            found = dict(workers.run([jobs[index] for index in turns]))
        assert [found[n] for n in range(12)] == [alone[index] for index in turns]
        assert sum(weights is not None for weights, *_ in sent) <= 4

        # the same tensor with other numbers in it
        expected = examiner.evaluate(Job(first * 2, "selection", (0,)))
        assert list(workers.run([Job(first.mul_(2), "selection", (0,))])) == [(0, expected)]

        ill = jobs_of(RAISE, WORD, TRAIN, QUIT, 1, EXIT, KILL)
        found = dict(workers.run(ill))
        assert found.pop(4) == examiner.evaluate(ill[4])  # in eval mode again
        told = {
            ill[index].parts[0]: Failure(re.sub(r" \(task\.py, line \d+\)$", "", r.line), r.is_task)
            for index, r in found.items()
            if isinstance(r, Failure)
        }
        assert found[0] != told[RAISE]  # it names the line
        assert len(told) == len(found)
        assert told == {
            RAISE: Failure("score() raised ValueError: no such level", False),
            WORD: Failure(
                'score() must return a number, or a dict like {"return": 1242.0}; found str', True
            ),
            TRAIN: Failure("score() raised ValueError: in the middle", False),
            QUIT: Failure("score() raised SystemExit: 7", False),
            EXIT: Failure("the process ended with exit code 3", False),
            KILL: Failure("the process was killed (signal 9), perhaps for want of memory", False),
        }
        assert workers._workers == []  # none is started for nothing
        ill = jobs_of(2, CRASH)
        workers._count = 1
        assert dict(workers.run(ill)) == {
            0: examiner.evaluate(ill[0]),
            1: Failure("the process was killed (signal 11)", False),
        }


def test_what_hangs_is_given_up_with_all_that_it_has_started(
    recipe: Recipe, tmp_path: Path
) -> None:
    with closing(Workers(recipe, 2, 2.5)) as workers:
        assert list(workers.run(jobs_of(0, 1), until=time.monotonic() - 1)) == []
        assert workers._workers == []
        hanging = Job(weights(1)[0], "selection", (HANG, 0))
        found: dict[int, Result] = {}
        for index, result in workers.run([hanging, *jobs_of(0, 1, 2, 3)]):
            found[index] = result
            for pid in pids_of(workers):
                os.kill(pid, signal.SIGINT)  # which is for us to answer
        assert found[0] == Failure("took longer than 5 s", False)
        assert all(isinstance(found[index], list) for index in range(1, 5))
        assert_gone(hung(tmp_path), within=5)
        pids = pids_of(workers)

        # one that dies while it has nothing to do
        os.kill(workers._workers[0].process.pid, signal.SIGKILL)
        workers._workers[0].process.wait()
        assert isinstance(dict(workers.run(jobs_of(4)))[0], list)

        # a budget in seconds holds, whatever is under way
        workers._timeout = 600.0
        end = time.monotonic() + 0.5
        assert list(workers.run(jobs_of(HANG), until=end)) == []
        assert time.monotonic() < end + 5
        assert_gone(hung(tmp_path), within=5)
        list(workers.run(jobs_of(5)))  # `close` ends one that waits, and one that starts
        pids += pids_of(workers)
    assert_gone(pids, within=0)


def hung(folder: Path) -> list[int]:
    """What score() has started while it hung, and its own process."""
    files = list(folder.glob("hangs-*"))
    assert files
    return [int(text) for file in files for text in (file.name.split("-")[1], file.read_text())]


PARENT = """
import pickle, sys
from sewa_cli.session.workers import Workers
recipe, jobs = pickle.load(open(sys.argv[1], "rb"))
workers = Workers(recipe, 2, None)  # of a program that is not made to be imported again
for _ in workers.run(jobs):
    print("a result")
"""


def test_nothing_outlives_the_parent(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "sent").write_bytes(pickle.dumps((recipe, jobs_of(HANG, HOLD))))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "sent")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("hangs-*"))) < 2:
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.1)
        pids = hung(tmp_path)
        assert len(pids) == 4
    finally:
        process.kill()
    out, _ = process.communicate()
    assert_gone(pids, within=5)
    assert out == b""


def test_a_start_that_fails_ends_the_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK + "\nraise OSError('no display')\n")
    with (
        closing(Workers(recipe, 1, None)) as workers,
        pytest.raises(UserCodeError, match=r"cannot be imported: OSError: no display") as raised,
    ):
        list(workers.run(jobs_of(0)))
    assert "line" in raised.value.frames
    assert raised.value.exit_code == 4
    assert workers._workers == []

    monkeypatch.setattr(pool, "READY", 0.3)
    with (
        closing(Workers(recipe, 1, None)) as workers,
        pytest.raises(TaskError, match=r"not ready after 0.3 s"),
    ):
        list(workers.run(jobs_of(0)))

    monkeypatch.setattr(pool, "START", "raise SystemExit(9)")
    with (
        closing(Workers(recipe, 1, None)) as workers,
        pytest.raises(TaskError, match="could not be started: the process ended with exit code 9"),
    ):
        list(workers.run(jobs_of(0)))
