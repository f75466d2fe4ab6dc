"""Interval means are read where a run has them, and weighed by their numbers of steps."""

import copy
import json
from pathlib import Path

import pytest
import torch
from helpers.saved import assert_mean
from helpers.tiny import TASK
from torch import nn

from sewa_cli.callbacks import IntervalMean, save_weights

SAVES = (4, 8, 12, 15)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Save snapshots and means of a walk; return the weights of all steps."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    mean, states = IntervalMean(model), {}
    for step in range(1, SAVES[-1] + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        mean.update()
        states[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if step in SAVES:
            save_weights(model, "ckpts", step, mean=mean)
    Path("task.py").write_text(TASK)
    return states


def test_latest_of_means_is_the_mean_of_all_their_steps(run, sewa):
    ended = sewa("average", "ckpts", "--method", "latest", "--K", 2, "-o", "a.safetensors")
    assert "using 4 interval means, of 3–4 steps each; --from snapshots uses" in ended.err
    assert ended.out.split() == ["ckpts/step-12.mean.safetensors", "ckpts/step-15.mean.safetensors"]
    assert_mean("a.safetensors", [run[step] for step in range(9, 16)])
    sewa("average", "ckpts", "--method", "uniform", "-o", "b.safetensors")
    assert_mean("b.safetensors", list(run.values()))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("snapshots", ["step-12", "step-15"]),
        ("means", ["step-12.mean", "step-15.mean"]),
        ("both", ["step-12.mean", "step-12", "step-15.mean", "step-15"]),
    ],
)
def test_from_says_what_is_read_and_a_save_counts_once(source, names, run, sewa):
    ended = sewa("average", "ckpts", "--from", source, "--last", 2, "-o", "a.safetensors")
    assert ended.out.split() == [f"ckpts/{name}.safetensors" for name in names]
    if source == "snapshots":
        assert_mean("a.safetensors", [run[12], run[15]])
    ended = sewa("inspect", "ckpts", "--from", source, "--json")
    assert len(json.loads(ended.out)["checkpoints"]) == 2 * len(names)


def test_a_save_without_a_mean_turns_the_default_to_snapshots(run, sewa):
    Path("ckpts/step-8.mean.safetensors").unlink()
    ended = sewa("average", "ckpts", "--last", 3, "-o", "a.safetensors")
    assert "using 3 snapshots, as step-8.safetensors has no interval mean" in ended.err
    assert_mean("a.safetensors", [run[8], run[12], run[15]])
    ended = sewa("average", "ckpts", "--last", 2, "-o", "b.safetensors")  # both of these have one
    assert "using 2 interval means" in ended.err
    for path in Path("ckpts").glob("step-?.safetensors"):
        path.unlink()  # a mean stands for itself
    ended = sewa("average", "ckpts", "--from", "means", "-o", "c.safetensors")
    assert_mean("c.safetensors", [run[step] for step in (1, 2, 3, 4, *range(9, 16))])


@pytest.mark.usefixtures("run")
def test_means_are_asked_for_where_there_are_none(sewa):
    for path in Path("ckpts").glob("*.mean.*"):
        path.unlink()
    ended = sewa("average", "ckpts", "--from", "means")
    assert ended.code == 2
    assert "--from means: there are no interval means; save them with means=True" in ended.err
    ended = sewa("average", "ckpts", "--from", "all")
    assert ended.code == 2
    assert "--from: must be 'snapshots', 'means' or 'both'" in ended.err


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("source", ["means", "both"])
def test_select_from_means_is_reported_and_rebuilt_byte_for_byte(source, sewa):
    Path("sewa.yaml").write_text(f"from: {source}\ncheckpoints: ckpts\ntask: task.py\n")
    assert sewa("select", "-o", "a.safetensors").code == 0
    report = json.loads(Path("a.report.json").read_text())
    assert report["config"]["source"] == source
    counts = [one["mean_steps"] for one in report["candidates"]]
    assert counts == ([4, 4, 4, 3] if source == "means" else [4, None, 4, None, 4, None, 3, None])
    assert sewa("verify", "a.safetensors").code == 0
    assert sewa("apply", "a.report.json", "-o", "b.safetensors").code == 0
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


@pytest.mark.usefixtures("run")
def test_the_mean_of_all_weighs_means_by_their_steps_in_select_and_compare(sewa):
    args = ("ckpts", "--task", "task.py", "--json")
    selected = json.loads(sewa("select", *args, "-o", "a.safetensors").out)
    compared = json.loads(sewa("compare", *args, "--methods", "uniform,best").out)
    sewa("average", "ckpts", "--method", "uniform", "-o", "mean.safetensors")
    [row] = json.loads(sewa("evaluate", "mean.safetensors", *args[1:]).out)["files"]
    expected = pytest.approx(row["heldout_loss"], rel=1e-5)
    assert selected["references"]["uniform"]["heldout_loss"] == expected
    assert compared["rows"][0]["heldout_loss"] == expected


@pytest.fixture
def icefall(tmp_path, monkeypatch):
    """Save files as icefall's train.py does; return the weights of the steps that it averages."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    average, states = copy.deepcopy(model).double(), {}
    Path("exp").mkdir()
    for step in range(1, 81):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        if step % 2 == 0:
            share = 2 / step
            for own, now in zip(average.parameters(), model.parameters(), strict=True):
                own.data = own.data * (1 - share) + now.data.double() * share
            states[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if step in (20, 41, 60, 80):
            state = {"model": model.state_dict(), "model_avg": average.state_dict()}
            about = {"batch_idx_train": step, "average_period": 2, "best_valid_loss": 0.5}
            torch.save({**state, **about, "optimizer": {}}, f"exp/checkpoint-{step}.pt")
    Path("task.py").write_text(TASK)
    return states


def test_icefalls_running_means_become_interval_means_the_first_too(icefall, sewa):
    from sewa_cli.checkpoints import Reads, open_all
    from sewa_cli.checkpoints.means import with_running

    opened = with_running(open_all([Path("exp")], Reads()))
    means = sorted((c for c in opened if c.mean_steps), key=lambda c: c.step or 0)
    assert [(c.step, c.mean_steps) for c in means] == [(20, 20), (41, 20), (60, 20), (80, 20)]
    for mean, first in zip(means, (2, 22, 42, 62), strict=True):
        for name in mean.tensors:
            steps = [icefall[step][name].double() for step in range(first, first + 20, 2)]
            expected = torch.stack(steps).mean(0)
            assert mean.read(name).dtype == torch.float32
            torch.testing.assert_close(mean.read(name).double(), expected, rtol=1e-6, atol=1e-6)
    ended = sewa("average", "exp", "--method", "latest", "--K", 3, "-o", "a.safetensors")
    assert "using 4 interval means, of 20 steps each" in ended.err
    assert "model_avg" not in ended.err
    assert_mean("a.safetensors", [icefall[step] for step in range(22, 81, 2)])
    Path("exp/checkpoint-20.pt").unlink()  # 60 reaches back to the start
    Path("exp/checkpoint-41.pt").unlink()
    ended = sewa("average", "exp", "--method", "uniform", "-o", "b.safetensors")
    assert "using 1 interval means, of 20 steps each" in ended.err
    assert_mean("b.safetensors", [icefall[step] for step in range(62, 81, 2)])


@pytest.mark.parametrize("source", ["snapshots", "means", "both"])
def test_icefalls_means_are_selected_from_written_and_rebuilt(source, icefall, sewa):
    ended = sewa("select", "exp", "--from", source, "--task", "task.py", "-o", "best.pt")
    assert ended.code == 0, ended.err
    found = torch.load("best.pt")
    assert found["batch_idx_train"] == 80
    assert found["model"].keys() == icefall[2].keys()
    assert sewa("verify", "best.pt").code == 0
    assert sewa("apply", "best.report.json", "-o", "again.pt").code == 0
    again = torch.load("again.pt")["model"]
    assert all(torch.equal(again[name], tensor) for name, tensor in found["model"].items())
    source = json.loads(Path("best.report.json").read_text())["recipe"]["sources"][-1]
    file = Path("exp", source["since"] or Path(source["path"]).name)
    assert (file.name == "checkpoint-60.pt") == (source["mean_steps"] is not None)
    file.write_bytes(Path("exp/checkpoint-20.pt").read_bytes())
    assert sewa("verify", "best.pt").code == 3
