"""Several ranks are one command: the same answer, one voice, and one end."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers.shells import environment, wait_for
from helpers.tiny import TASK, Ended, report_of
from helpers.together import alike, on_ranks, sewa_on
from safetensors.torch import load_file, save_file

from sewa_cli import interrupts

pytestmark = pytest.mark.usefixtures("uneven")

BREADTH = pytest.mark.breadth
SOON = 10  # seconds in which all ranks end when one does: mostly imports that torchrun makes
# batches of 125, 125 and 51 rows: they split evenly among no ranks
UNEVEN = TASK.replace("rows=300", "rows=301").replace("split(128)", "split(125)")
# one that prints, and fails on one rank in the way that the environment names
FAILING = (
    UNEVEN
    + """
import os, pathlib
calls = 0
def predict(model, batch):
    global calls
    calls += 1
    if calls > 30 and os.environ.get("RANK") == "1":
        pathlib.Path("begun").touch()
        if os.environ["HOW"] == "memory":
            raise torch.OutOfMemoryError("out of memory")
        raise ValueError("boom")
    return model(batch[0])
"""
)


@pytest.fixture
def uneven(run_dir):
    (run_dir / "task.py").write_text(UNEVEN)
    return run_dir


def test_two_ranks_choose_and_write_what_one_does(sewa):
    alone = sewa("select", "--solver", "gumbel", "-o", "one.safetensors")
    assert alone.code == 0, alone.err
    both = sewa_on(2, "select", "--solver", "gumbel", "-o", "two.safetensors")
    assert both.code == 0, both.err
    assert both.out == alone.out
    assert len(both.err.splitlines()) == len(alone.err.splitlines())
    assert both.err.count("wrote ") == 1
    assert Path("two.safetensors").read_bytes() == Path("one.safetensors").read_bytes()
    one, two = report_of("one.report.json"), report_of("two.report.json")
    alike(two, one)
    assert two["parameters"] == one["parameters"]
    assert two["standing"]["weights"] == one["standing"]["weights"] == one["parameters"]
    assert two["standing"]["explanation"] == one["standing"]["explanation"]
    assert two["standing"]["motion"]["run"] == pytest.approx(one["standing"]["motion"]["run"])
    assert two["cost"]["bytes_read"] <= 1.1 * one["cost"]["bytes_read"] / 2
    assert two["placement"]["planned_bytes"] <= 1.15 * one["placement"]["planned_bytes"] / 2
    # the recipe is the same, too
    assert sewa("apply", "two.report.json", "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("one.safetensors").read_bytes()


@pytest.mark.breadth
def test_ranks_that_are_given_other_batches_are_told_of():
    with Path("task.py").open("a") as task:
        task.write(
            "\nimport os\nall_of_it = selection_data\n"
            "def selection_data(**args):\n"
            "    return list(all_of_it(**args))[: 3 - int(os.environ.get('RANK', '0'))]\n"
        )
    ended = sewa_on(2, "evaluate", "ckpts/step-10.safetensors")
    assert ended.code == 1
    assert ended.error.startswith("rank 1 is given other batches than rank 0")


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--solver", "linear"],
        ["--K", "auto"],
        ["--K", "auto", "--sparse"],
        *(["--solver", "gumbel", "--set", f"tier={tier}"] for tier in ("bf16", "files")),
    ],
    ids=" ".join,
)
def test_every_solver_and_tier_gives_the_same_answer(sewa, arguments, ranks):
    assert sewa("select", *arguments, "-o", "one.safetensors").code == 0
    ended = sewa_on(ranks, "select", *arguments, "-o", "more.safetensors")
    assert ended.code == 0, ended.err
    alike(report_of("more.report.json"), report_of("one.report.json"))
    found, expected = (load_file(f"{name}.safetensors") for name in ("more", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)  # how-to/scale.md


@pytest.mark.breadth
def test_compare_and_evaluate_are_the_same_on_two_ranks(sewa):
    for command in (
        ["compare", "--methods", "sewa,last,uniform,greedy", "--K", "4", "--json"],
        ["evaluate", "ckpts/step-10.safetensors", "ckpts/step-20.safetensors", "--json"],
    ):
        alone, both = sewa(*command), sewa_on(2, *command)
        assert (alone.code, both.code) == (0, 0), both.err
        here, there = json.loads(alone.out), json.loads(both.out)
        rows = [found.get("rows") or found["files"] for found in (here, there)]
        for one, other in zip(*rows, strict=True):
            assert one["heldout_loss"] == pytest.approx(other["heldout_loss"], rel=1e-5)


@pytest.mark.breadth
def test_nan_in_the_columns_of_one_rank_is_left_out_by_all(sewa):
    path = "ckpts/step-60.safetensors"
    broken = load_file(path)
    broken["0.weight"][-1, -1] = torch.nan  # the last rank's
    save_file(broken, path)
    for arguments in (["--solver", "gumbel"], ["--solver", "linear"]):
        assert sewa("select", *arguments, "-f", "-o", "one.safetensors").code == 0
        ended = sewa_on(2, "select", *arguments, "-f", "-o", "two.safetensors")
        assert ended.code == 0, ended.err
        assert ended.err.count("left out") == 1
        one, two = report_of("one.report.json"), report_of("two.report.json")
        alike(two, one)
        assert two["left_out"] == one["left_out"]
        assert two["warnings"] == one["warnings"]


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("raise", "rank 1: predict() raised ValueError: boom"),
        pytest.param("memory", "rank 1: predict() raised OutOfMemoryError", marks=BREADTH),
    ],
)
def test_a_rank_that_raises_is_named_and_ends_all(how, line):
    Path("task.py").write_text(FAILING)
    ended = sewa_on(2, "select", "--solver", "gumbel", HOW=how)
    assert time.time() - Path("begun").stat().st_mtime < SOON
    assert ended.code == 1
    assert ended.error.startswith(line), ended.err
    assert ended.out == ""
    assert not list(Path().glob("averaged*"))


@pytest.mark.breadth
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line(number):
    with started(0, "learning") as running:
        if number == signal.SIGINT:  # a terminal sends it to all
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        _, err = running.communicate(timeout=60)
    assert err.count(interrupts.LINE) == 1
    assert "error: " not in err
    assert not list(Path().glob("averaged*"))


SLOW = (
    UNEVEN
    + """
import os, pathlib, time
calls = 0
def mark(name):
    if os.environ.get("RANK") == os.environ["SLOW"]:
        pathlib.Path(name).touch()
        if os.environ["WHEN"] == name:
            time.sleep(100)
def build_model():
    mark("building")
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
learned = False
def predict(model, batch):
    global calls, learned
    calls += 1
    mark("first")
    if calls > 20:
        mark("simple")
    if torch.is_grad_enabled():
        learned = True
        mark("learning")
    elif learned:
        mark("scoring")
    return model(batch[0])
"""
)


def started(slow, when):
    """Return a run on two ranks, of which one sleeps at that point."""
    Path("task.py").write_text(SLOW)
    running = subprocess.Popen(
        on_ranks(2, "select", "--solver", "gumbel"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), "SLOW": str(slow), "WHEN": when},
        start_new_session=True,
    )
    wait_for(Path(when))
    return running


def processes_of(folder):
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


@pytest.mark.parametrize(
    ("killed", "when"),
    [
        (1, "learning"),
        *(
            pytest.param(killed, when, marks=BREADTH)
            for killed in (0, 1)
            for when in ("building", "first", "simple", "learning", "scoring")
        ),
    ],
)
def test_a_rank_that_is_killed_ends_all(uneven, killed, when):
    with started(killed, when) as running:
        processes = psutil.Process(running.pid).children(recursive=True)
        [victim] = [p for p in processes if p.environ().get("RANK") == str(killed)]
        start = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        out, err = running.communicate(timeout=60)
        assert time.monotonic() - start < SOON
    ended = Ended(running.returncode, out, err)
    assert (ended.code, ended.out) == (1, "")
    assert ended.error.startswith(f"rank {killed} was killed")
    assert interrupts.LINE not in err
    assert not list(Path().glob("averaged*"))
    left = [process.pid for process in processes_of(uneven) if process.pid != os.getpid()]
    assert not left
