"""`--cache`: a run that was killed goes on where it was, and ends with the same bytes."""

import json
from collections import Counter

import numpy as np
import pytest
from helpers.tiny import train_tiny
from torch import nn

from sewa_cli import cache, select
from sewa_cli.errors import ConfigError

# each pass through the model is a line of a file: which weights, which batch
TASK = """
import os, time, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F

passes = 0

def data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 6, generator=generator)
    return list(zip(x.split(25), (x[:, 0] * x[:, 1] > 0).long().split(25)))

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def cache_key(notes="notes.txt", scale=1):
    return Path("key").read_text()

def selection_data():
    return data(1)

def heldout_data():
    return data(2)

def predict(model, batch):
    global passes
    passes += 1
    if passes > int(os.environ.get("STOP", 10**9)):
        raise RuntimeError("stopped")
    weights = sum(float((p.data.double() * 7**i).sum()) for i, p in enumerate(model.parameters()))
    with open(os.environ["PASSES"], "a") as log:
        log.write(f"{weights.hex()} {float(batch[0].sum()).hex()}\\n")
    time.sleep(float(os.environ.get("SLOW", 0)))
    return model(batch[0])

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])

def metrics(model):
    return {"size": float(sum(p.abs().sum() for p in model.parameters())), "a": 1.0}
"""
FRAME = 4 * 3  # passes that every run makes, to see how large outputs are: twice a round
AT_ONCE = 2 * 3  # of the result that a kill takes with it: at most M samples, or a set of data


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PASSES", str(tmp_path / "passes"))
    train_tiny(tmp_path / "ckpts", 8)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "key").write_text("one")
    (tmp_path / "notes.txt").write_text("one")
    (tmp_path / "sewa.yaml").write_text(
        "task: ./task.py\nargs: {notes: ./notes.txt}\ncheckpoints: ckpts\n"
        "device: cpu\nmemory: 1GiB\n"
        "gumbel: {iterations: 12}\n"
        "aggregate: {folds: 3}\n"
    )
    return tmp_path


def passes(run):
    """And forgets them."""
    log = run / "passes"
    found = Counter(log.read_text().splitlines()) if log.exists() else Counter[str]()
    log.unlink(missing_ok=True)
    return found


def same(text):
    """A report without what may differ: times, passes, names, and how much was recalled."""
    report = json.loads(text)
    for key in ("created", "command", "cost", "config", "output", "recipe", "files", "placement"):
        report.pop(key, None)
    for row in report.get("rows", []):
        row.pop("cost")
    return report


COMMANDS = {
    "aggregate": ("select",),
    "gumbel": ("select", "-K", 3),
    "linear": ("select", "-K", 3, "--solver", "linear"),
    "compare": ("compare", "--methods", "sewa,last,uniform,greedy,twa:iterations=6", "-K", 3),
    "evaluate": ("evaluate",),
}


def asked(sewa, command, *more):
    flags = [*COMMANDS[command], "--json", *more]
    if flags[0] == "select":
        flags += ["-o", "average.safetensors", "--force"]
    return sewa(*flags)


def bytes_of(run):
    path = run / "average.safetensors"
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=[pytest.mark.breadth] if one == "gumbel" else []) for one in COMMANDS],
)
def test_with_a_cache_empty_or_full_or_half_full_all_is_as_without(run, sewa, monkeypatch, command):
    plain = asked(sewa, command)
    assert plain.code == 0, plain.err
    written, report, needed = bytes_of(run), same(plain.out), passes(run)
    filling = asked(sewa, command, "--cache", "kept")
    assert (bytes_of(run), same(filling.out)) == (written, report)
    once = passes(run)
    assert set(once) == set(needed)
    full = asked(sewa, command, "--cache", "kept")
    assert (bytes_of(run), same(full.out)) == (written, report)
    assert passes(run).total() <= FRAME
    if command != "evaluate":  # whose report says nothing of its cost
        assert json.loads(full.out)["cost"]["recalled"] > 5
    if command == "aggregate":  # which takes long, and is killed below
        return
    made = Counter[str]()
    steps = 0
    for stop in (once.total() // 3, once.total() // 2):  # then it breaks off
        monkeypatch.setenv("STOP", str(stop))
        broken = asked(sewa, command, "--cache", "other")
        steps += broken.code == 4
        made += passes(run)
    monkeypatch.delenv("STOP")
    last = asked(sewa, command, "--cache", "other")
    assert (bytes_of(run), same(last.out)) == (written, report)
    made += passes(run)
    assert steps > 0
    assert made.total() <= once.total() + steps * (FRAME + AT_ONCE)
    again = [one for one, times in made.items() if times > once[one]]
    assert len(again) <= 6 + steps * AT_ONCE  # the frames', and what broke off


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


DOUBLE = TASK.replace("batch[1])", "batch[1]) * 2")
CHANGES = {
    "a checkpoint": lambda run: change_a_byte(run / "ckpts" / "step-40.safetensors"),
    "the task": lambda run: (run / "task.py").write_text(DOUBLE),
    "a file that an argument names": lambda run: (run / "notes.txt").write_text("another"),
    "the cache key": lambda run: (run / "key").write_text("two"),
    "an argument": ["--set", "args.scale=2"],
    "the seed": ["--seed", "1"],
}


def recalled(ended):
    assert ended.code == 0, ended.err
    return int(json.loads(ended.out)["cost"]["recalled"])


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_never_answered_from_the_cache(run, sewa, what):
    needed, change, flags = [], CHANGES[what], list[str]()
    for changed in (False, False, True):
        if changed and callable(change):
            change(run)
        elif changed:
            flags = change
        assert asked(sewa, "evaluate", "--cache", "kept", *flags).code == 0
        needed.append(passes(run).total())
    assert needed == [needed[0], 0, needed[0]]


NET = """
from torch import nn

def make_net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
"""


@pytest.mark.parametrize("changed", ["net.py", None])
def test_files_of_a_ready_made_task_are_known(run, sewa, changed):
    draw = np.random.default_rng(0)
    for part in ("dev", "test"):
        x = draw.normal(size=(60, 6)).astype(np.float32)
        np.savez(run / f"{part}.npz", x=x, y=(x[:, 0] * x[:, 1] > 0).astype(np.int64))
    (run / "net.py").write_text(NET)
    (run / "sewa.yaml").write_text(
        "task: classification\ncheckpoints: ckpts\n"
        "args: {model: net.py:make_net, selection: dev.npz, heldout: test.npz}\n"
    )
    assert recalled(asked(sewa, "linear", "--cache", "kept")) == 0
    if changed == "net.py":
        (run / "net.py").write_text(NET + "# changed")
    assert (recalled(asked(sewa, "linear", "--cache", "kept")) > 0) == (changed is None)


def test_functions_that_are_in_no_file_are_refused(run):
    with pytest.raises(ConfigError, match="in no Python file"):
        select("ckpts", model=nn.Linear(6, 2), selection_data=list, loss=len, cache=run / "kept")


def test_a_folder_that_cannot_be_written_or_is_spoilt_does_not_end_the_run(run, sewa):
    plain = asked(sewa, "gumbel")
    written = bytes_of(run)
    assert asked(sewa, "gumbel", "--cache", "kept").code == 0
    for path in (run / "kept").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-3])
    spoilt = asked(sewa, "gumbel", "--cache", "kept")
    assert (spoilt.code, bytes_of(run)) == (0, written)
    assert same(spoilt.out) == same(plain.out)
    assert json.loads(spoilt.out)["cost"]["recalled"] == 0
    (run / "kept" / "notes").write_text("mine")
    ended = asked(sewa, "gumbel", "--cache", "kept/notes")
    assert ended.code == 2
    assert "is not a folder" in ended.error
    ended = asked(sewa, "gumbel", "--cache", "kept/notes/inside")
    assert (ended.code, bytes_of(run)) == (0, written)
    assert "cannot be written" in ended.err


def interrupt(_):
    raise KeyboardInterrupt


def test_a_language_model_run_killed_at_several_points_ends_with_the_same_bytes(
    frozen, sewa, monkeypatch
):
    folder = frozen("transformers").folder
    (folder / "sewa.yaml").write_text("task: task.py\ncheckpoints: run\naggregate: {folds: 3}\n")
    flags = ("select", "--json", "--force", "-o", "average.safetensors")
    plain = sewa(*flags)
    assert plain.code == 0, plain.err
    written = (folder / "average.safetensors").read_bytes()
    (folder / "average.safetensors").unlink()
    kept = 0
    for more in (0, 3, 8):  # results that are written before the kill
        steps = iter([cache.new_file] * more)
        with monkeypatch.context() as killing:
            killing.setattr(cache, "new_file", lambda path: next(steps, interrupt)(path))  # noqa: B023
            assert sewa(*flags, "--cache", "kept").code == 130
        kept += more
        assert len([*(folder / "kept").glob("??/*")]) == kept
    ended = sewa(*flags, "--cache", "kept")
    assert recalled(ended) >= kept
    assert (folder / "average.safetensors").read_bytes() == written
    assert same(ended.out) == same(plain.out)
