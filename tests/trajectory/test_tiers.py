"""Where W lives changes what it costs, not what it gives."""

import json
import weakref
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from helpers.memory import WIDE_TASK, peaks
from helpers.tiny import WEIGHTS as BYTES
from helpers.tiny import report_of
from hypothesis import given, settings
from safetensors.torch import save_file
from torch import nn

from sewa_cli.objective.model import FlatModel
from sewa_cli.trajectory import placement as placing
from sewa_cli.trajectory.placement import free_on_host
from sewa_cli.trajectory.tiers import Deltas, Dense, Streamed

CPU = torch.device("cpu")
WORK = BYTES * (2 * 2 + placing.SPARE)  # the solver's vectors at M = 2


class Rows:
    """A source in memory."""

    device = CPU
    gather = None

    def __init__(self, W, layout):
        self.layout = layout
        self.count = len(W)
        self.broken = set()
        self._W = W

    def fill(self, i, row):
        row.copy_(self._W[i])
        return i not in self.broken


def tiers(k, width, seed):
    """The same random W [k, P] in every tier."""
    torch.manual_seed(seed)
    layout = FlatModel(nn.Linear(width, 3), CPU).layout
    W = torch.randn(layout.size) + 0.1 * torch.randn(k, layout.size)
    source = Rows(W, layout)
    read = (Dense.read(source), Deltas.read(source), Streamed.read(source, rows=3))
    return W, dict(zip(("memory", "bf16", "files"), read, strict=True))


@settings(max_examples=25)
@given(st.integers(1, 130), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**31))
def test_every_tier_mixes_and_pulls_back_like_the_naive_product(k, width, M, seed):
    W, held = tiers(k, width, seed)
    a = torch.rand(M, k, dtype=torch.float64)
    G = torch.randn(M, W.shape[1])
    flat, pulled = a @ W.double(), G.double() @ W.double().T
    distance = (W - W.mean(0)).abs().max().double()
    for name, trajectory in held.items():
        # float32 throughout, and for bf16 2⁻⁸ of a difference from the mean, k times
        rounding = 2**-8 * distance if name == "bf16" else 0.0
        found = trajectory.mix(a).double()
        bound = a.sum(1, keepdim=True) * (rounding + 2e-6 * W.abs().max())
        assert ((found - flat).abs() <= bound).all(), name
        found = trajectory.pull_back(G).double()
        bound = G.double().abs().sum(1, keepdim=True) * (rounding + 2e-6 * W.abs().max())
        assert ((found - pulled).abs() <= bound).all(), name


def caps():
    return {
        "memory": 12 * BYTES + WORK,
        "bf16": 6 * BYTES + 2 * BYTES + WORK,
        "files": 2 * BYTES + WORK,
    }


def run_in(sewa, tier, *arguments):
    name = f"{tier}.safetensors"
    ended = sewa(
        *("select", "--memory", caps()[tier], "--set", "gumbel.iterations=30"),
        *("-o", name, "--force", *arguments),
    )
    assert ended.code == 0, ended.err
    return report_of(f"{tier}.report.json")


@pytest.mark.usefixtures("run_dir")
def test_every_tier_selects_an_average_of_the_same_loss(sewa):
    reports = {tier: run_in(sewa, tier) for tier in ("memory", "bf16", "files")}
    for tier, report in reports.items():
        assert report["placement"]["tier"] == tier
        assert report["placement"]["planned_bytes"] <= caps()[tier]
        assert "the cap is" in report["placement"]["reason"]
        # the references are exact in every tier
        for name, scores in report["references"].items():
            expected = reports["memory"]["references"][name]["heldout_loss"]
            assert scores["heldout_loss"] == pytest.approx(expected, rel=1e-6)
    # float32 from the files is the same arithmetic; bf16 is close enough to choose as well
    assert reports["files"]["selected"] == reports["memory"]["selected"]
    losses = {tier: report["average"]["selection_loss"] for tier, report in reports.items()}
    assert losses["bf16"] == pytest.approx(losses["memory"], rel=0.02)


ONCE = """
failed = []
def predict(model, batch):
    if len(failed) < {times}:
        failed.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")
    return model(batch[0])
"""


def fail_in_forward_passes(times):
    Path("task.py").write_text(Path("task.py").read_text() + ONCE.format(times=times))


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("command", ["select", "compare --methods sewa,last"])
def test_memory_that_runs_out_while_learning_or_in_the_users_code_lowers_the_tier(sewa, command):
    """On a GPU that is the usual case: W is placed first, activations come later."""
    fail_in_forward_passes(2)
    form = ["--json"] if command == "select" else ["--format", "json"]
    ended = sewa(*command.split(), *form, "--K", 3)
    assert ended.code == 0, ended.err
    assert "memory ran out in the memory tier; trying the next" in ended.err
    assert "memory ran out in the bf16 tier; trying the next" in ended.err
    placement = json.loads(ended.out)["placement"]
    assert placement["tier"] == "files"
    assert "memory ran out" in placement["reason"]


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("flags", [[], ["--solver", "linear"]])
def test_memory_that_runs_out_in_the_users_code_to_the_last_is_told_with_its_frames(sewa, flags):
    fail_in_forward_passes(10**6)
    ended = sewa("select", *flags)
    assert ended.code == 4
    assert "predict() raised OutOfMemoryError: CUDA out of memory" in ended.error
    assert "task.py" in ended.err
    assert not list(Path().glob("averaged*"))


@pytest.mark.usefixtures("run_dir")
def test_what_was_held_is_let_go_before_the_next_tier_is_tried(sewa, monkeypatch):
    plain, held = placing.Placer.place, list[Any]()
    alive = []

    def place(self):
        alive.append(sum(ref() is not None for ref in held))
        placed = plain(self)
        held.append(weakref.ref(placed.trajectory))
        return placed

    monkeypatch.setattr(placing.Placer, "place", place)
    fail_in_forward_passes(2)
    assert sewa("compare", "--methods", "sewa,last", "--K", 3).code == 0
    assert len(alive) >= 3
    assert set(alive) == {0}


@pytest.mark.parametrize(
    ("limit", "left"), [("300000\n", 250_000), ("max\n", None), ("40000\n", 0)]
)
def test_a_containers_limit_counts_and_its_cached_files_are_free(
    tmp_path, monkeypatch, limit, left
):
    (tmp_path / "max").write_text(limit)
    (tmp_path / "current").write_text("100000\n")
    (tmp_path / "memory.stat").write_text("anon 50000\nactive_file 20000\ninactive_file 30000\n")
    nowhere = (tmp_path / "nowhere", "max", "current", "")
    monkeypatch.setattr(
        "sewa_cli.trajectory.placement.CGROUPS", [nowhere, (tmp_path, "max", "current", "")]
    )
    found = free_on_host()
    assert found == left or (left is None and found > 10**6)


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lots", "--memory: must be a size such as 8GiB"),
        ("8GX", "must be a size"),
        ("0", "greater than or equal to 1"),
        ("1KB", "memory: 1000 B is too little"),
    ],
)
def test_a_cap_that_makes_no_sense_is_told(sewa, text, words):
    ended = sewa("select", "--memory", text)
    assert ended.code == 2
    assert words in ended.error


def test_a_trajectory_four_times_the_cap_stays_within_it(tmp_path, monkeypatch):
    """80 checkpoints of 4 MB under a cap of 80 MB, and 30 MB for Python and torch."""
    if not Path("/proc/self/status").exists():
        pytest.skip("anonymous memory is read from /proc")
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(WIDE_TASK)
    Path("ckpts").mkdir()
    torch.manual_seed(0)
    weight, noise = 0.03 * torch.randn(1000, 1000), 0.01 * torch.randn(1000, 1000)
    for step in range(80):
        state = {"weight": weight + noise.roll(step, 1), "bias": noise[step].clone()}
        save_file(state, f"ckpts/step-{step}.safetensors")
    command = "select ckpts --task task.py --K 8 --device cpu"
    command += " --set gumbel.iterations=2 --set gumbel.samples=1"
    capped, free = peaks(f"{command} --memory {m} -o {m}.safetensors" for m in ("80MB", "2GB"))
    assert capped < 110e6
    assert free > 320e6
    one, other = (json.loads(Path(f"{m}.report.json").read_text()) for m in ("80MB", "2GB"))
    assert (one["placement"]["tier"], other["placement"]["tier"]) == ("files", "memory")
    losses = [report["average"]["selection_loss"] for report in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
