"""Parts scored in several processes: the same numbers, whatever happens to one of them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers.shells import environment
from helpers.tiny import train_tiny

from sewa_cli.config import Config
from sewa_cli.scoring.jobs import Job, PartPlaces, WorkerRecipe
from sewa_cli.scoring.workers import InProcess, Workers
from sewa_cli.solvers.board import Failed

# how score() is to behave, part by part; the first eight give numbers
TASK = """
import os, pathlib, random, signal, subprocess, sys, time
import numpy as np
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def score_parts():
    return 8 * ["draw"] + ["raise", "word", "exit", "kill", "quit", "hang"]

def heldout_parts():
    return 3 * ["draw"]

def score(model, part):
    print("printed by score()")
    if part == "raise":
        raise ValueError("no such level")
    if part == "word":
        return "good"
    if part == "exit":
        os._exit(3)
    if part == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "quit":
        sys.exit(7)
    if part == "hang":
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (HERE / f"hangs-{os.getpid()}").write_text(str(other.pid))
        time.sleep(600)
    outputs = model(torch.randn(50, 6)).double()
    drawn = random.random() + np.random.rand() + float(torch.rand(1))
    return {"drawn": drawn, "mean": outputs.mean()}
"""
DRAWS, RAISE, WORD, EXIT, KILL, QUIT, HANG = (range(8), *range(8, 14))


def recipe_in(folder, task=TASK):
    (folder / "task.py").write_text(task)
    *_, newest = train_tiny(folder / "ckpts", k=2)
    config = Config(task=str(folder / "task.py"), checkpoints=(newest,), device="cpu", seed=5)
    places = {
        "selection": PartPlaces("selection", range(14)),
        "heldout": PartPlaces("heldout", (2, 0)),
    }
    names = {"selection": None, "heldout": None}
    return WorkerRecipe(config, newest, {}, "cpu", places, names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def workers(folder):
    found = Workers(recipe_in(folder), 2, 2.5)
    yield found
    pids = [child.pid for child in processes()]
    found.close()
    assert_gone(pids, within=0)


@pytest.fixture(scope="module")
def alone(folder):
    return InProcess(recipe_in(folder).open())


def weights(seed=0):
    return torch.randn(146, generator=torch.Generator().manual_seed(seed))


def jobs(stored, *parts):
    return [Job(stored, "selection", (part,)) for part in parts]


def processes():
    """List the processes of workers, and all that these have started."""
    every = psutil.Process().children(recursive=True)
    return [one for one in every if is_of_workers(one)]


def is_of_workers(process):
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended, perhaps as a zombie
        return False


def assert_gone(pids, within=5.0):
    end = time.monotonic() + within
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def hung(folder):
    """Return the processes that hang in score(), and what they have started."""
    files = list(folder.glob("hangs-*"))
    assert files
    return [int(text) for file in files for text in (file.name.split("-")[1], file.read_text())]


def test_results_do_not_depend_on_who_works(workers, alone, capfd):
    def results(pool):
        first, second = (pool.store(weights(seed)) for seed in range(2))
        every = [*jobs(first, *DRAWS), *jobs(second, *DRAWS)]
        every += [Job(first, "selection", (0, 1, 2)), Job(second, "heldout", (1, 0))]
        return dict(pool.run(every))

    state = torch.get_rng_state()
    expected = results(alone)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [found[0]["drawn"] for found in expected.values()]
    assert len(set(drawn[:8])) == 8  # each part has its own seed
    assert drawn[:8] == drawn[8:16]  # and every average is judged by the same draws
    assert drawn[17] not in drawn[:8]
    capfd.readouterr()
    assert results(workers) == expected
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("printed by score()") == 21


def test_what_fails_is_reported_and_replaced(workers, alone):
    stored = workers.store(weights())
    found = dict(workers.run(jobs(stored, RAISE, WORD, QUIT, EXIT, KILL, 1)))
    assert found[5] == next(alone.run(jobs(weights(), 1)))[1]
    lines = {n: re.sub(r" \(task\.py, line \d+\)$", "", found[n].line) for n in range(5)}
    assert lines == {
        0: "score() raised ValueError: no such level",
        1: 'score() must return a number, or a dict like {"return": 1242.0}; found str',
        2: "score() raised SystemExit: 7",
        3: "the process ended with exit code 3",
        4: "the process was killed (signal 9), perhaps for want of memory",
    }
    assert lines[0] != found[0].line  # it names the line
    assert [isinstance(one, Failed) and one.is_final for one in found.values()].count(True) == 1


def test_what_hangs_is_given_up_with_all_that_it_has_started(workers, folder):
    stored = workers.store(weights())
    assert list(workers.run(jobs(stored, 0, 1), until=time.monotonic() - 1)) == []
    found = {}
    for index, result in workers.run([Job(stored, "selection", (HANG, 0)), *jobs(stored, 0, 1)]):
        found[index] = result
        for one in processes():
            one.send_signal(signal.SIGINT)  # which is for us to answer
    assert found[0] == Failed("took longer than 5 s")
    assert isinstance(found[1], list)
    assert isinstance(found[2], list)
    assert_gone(hung(folder))
    # a budget in seconds holds, whatever is under way
    end = time.monotonic() + 0.5
    assert list(workers.run(jobs(stored, HANG), until=end)) == []
    assert time.monotonic() < end + 5
    workers.discard(stored)
    assert not stored.exists()


@pytest.mark.breadth  # one that dies with a lock of the pool costs a minute and a job
def test_a_process_that_dies_while_it_has_nothing_to_do_is_replaced(workers):
    stored = workers.store(weights())
    assert isinstance(dict(workers.run(jobs(stored, 1)))[0], list)
    idle, *_ = (one for one in processes() if one.parent().pid == os.getpid())
    idle.kill()
    idle.wait(5)
    dict(workers.run(jobs(stored, 2)))
    assert isinstance(dict(workers.run(jobs(stored, 3)))[0], list)
    workers.discard(stored)


PARENT = """
import sys, torch
from pathlib import Path
from test_workers import HANG, jobs, recipe_in, weights
from sewa_cli.scoring.workers import Workers
if __name__ == "__main__":
    workers = Workers(recipe_in(Path(sys.argv[1])), 2, None)
    list(workers.run(jobs(workers.store(weights()), HANG, HANG)))
"""


@pytest.mark.breadth
def test_nothing_outlives_the_parent(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    known = environment()
    known["TMPDIR"] = str(tmp_path)
    known["PYTHONPATH"] = os.pathsep.join([paths, known.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)], env=known
    )
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("hangs-*"))) < 2:
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.1)
        pids = hung(tmp_path)
    finally:
        process.kill()
    process.wait()
    assert_gone(pids)
    assert [*tmp_path.glob("sewa-*")] == []
