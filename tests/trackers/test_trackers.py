"""Trackers get the report: TensorBoard's own reader finds it again, and so does anybody's hook."""

import importlib.metadata
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.pages import raw, report

from sewa_cli.trackers import curves, numbers

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "reports.md"


@pytest.mark.usefixtures("run_dir")
def test_tensorboard_has_numbers_curves_names_and_pictures(sewa):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = sewa("select", "-o", "out.safetensors", "--log", "tensorboard:runs")
    assert ended.code == 0, ended.err
    found = EventAccumulator("runs", {"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    content = json.loads(Path("out.report.json").read_text())
    weights = {event.step: event.value for event in found.Scalars("sewa/weight")}
    assert weights == pytest.approx({c["step"]: c["weight"] for c in content["candidates"]})
    baseline, scores = next(iter(content["references"].items()))
    for tag, exact in {
        "sewa/heldout_loss": content["average"]["heldout_loss"],
        "sewa/selection_loss": content["average"]["selection_loss"],
        "sewa/baseline_loss": scores["heldout_loss"],
        "sewa/last_loss": content["references"]["last"]["heldout_loss"],
    }.items():
        [loss] = found.Scalars(tag)
        assert loss.value == pytest.approx(exact, rel=1e-6)
    texts = {tag: found.Tensors(tag)[0].tensor_proto for tag in found.Tags()["tensors"]}
    assert texts["sewa/baseline/text_summary"].string_val[0].decode() == baseline
    assert b"uniform" in texts["sewa/select/table/text_summary"].string_val[0]
    assert len(found.Tags()["images"]) >= 3
    every = [tag for kind in ("scalars", "images", "tensors") for tag in found.Tags()[kind]]
    assert not [tag for tag in every if " " in tag or baseline in tag]


@pytest.mark.parametrize("name", ["select", "mask", "compare", "evaluate", "inspect"])
def test_tags_are_the_same_in_every_run_and_have_no_space(name):
    content = raw(name)
    other = json.loads(json.dumps(content))
    if name in ("select", "mask"):  # another baseline
        other["references"] = {"ema K=7": content["references"]["last"], **content["references"]}
    for place in (content, other):
        for scores in place["files"] if name == "evaluate" else [place.get("average", {})]:
            scores["metrics"] = {"top 5": 0.5}
    one, two = ({**numbers(report(c)), **curves(report(c))} for c in (content, other))
    assert one
    assert one.keys() == two.keys()
    assert all(re.fullmatch(r"sewa/\S+", tag) for tag in one)


def installed(monkeypatch, function):
    entry = SimpleNamespace(name="mine", load=lambda: function)
    own = importlib.metadata.entry_points

    def entry_points(**params):
        return [entry] if params == {"group": "sewa.trackers"} else own(**params)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


@pytest.mark.usefixtures("run_dir")
def test_an_installed_tracker_gets_the_report_when_all_is_written(sewa, monkeypatch):
    got = []

    def log(found, where):
        assert Path("out.safetensors").exists()
        got.append((found.kind, found.average.heldout_loss, where))

    installed(monkeypatch, log)
    assert sewa("select", "-o", "out.safetensors", "--log", "mine:some/where:else").code == 0
    content = json.loads(Path("out.report.json").read_text())
    assert got == [("select", content["average"]["heldout_loss"], "some/where:else")]


@pytest.mark.usefixtures("run_dir")
def test_a_tracker_that_fails_is_the_users_code_and_costs_no_result(sewa, monkeypatch):
    def log(*_):
        raise OSError("no network")

    installed(monkeypatch, log)
    ended = sewa("inspect", "--html", "page.html", "--log", "mine")
    assert ended.code == 4
    assert "mine() raised OSError: no network" in ended.error
    assert Path("page.html").exists()


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("asked", "code", "why"),
    [
        ("nobody", 2, "there are tensorboard, wandb"),
        ("tensorboard", 2, "name a folder"),
        ("tensorboard:task.py", 3, "is not a folder"),
        ("wandb:a-project", 2, "pip install wandb"),
    ],
)
def test_a_tracker_is_refused_before_any_work(monkeypatch, sewa, asked, code, why):
    monkeypatch.setitem(sys.modules, "wandb", None)
    ended = sewa("select", "-o", "out.safetensors", "--log", asked)
    assert ended.code == code
    assert why in ended.error
    assert not Path("out.safetensors").exists()


def test_the_documented_hook_is_ours_for_weights_and_biases():
    from sewa_cli.trackers import wandb

    [example] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    _, body = example.split("\ndef send(report, where):\n")
    assert len(body.strip().splitlines()) <= 10
    assert inspect.getsource(wandb.send).split("\n", 1)[1] == body


@pytest.fixture
def wandb(run_dir, monkeypatch):
    found = pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("ERROR_REPORTING", "false")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(run_dir / "settings"))
    return found


@pytest.mark.breadth
def test_weights_and_biases_keeps_the_report_offline(wandb, sewa):
    ended = sewa("select", "-o", "out.safetensors", "--log", "wandb:a-project")
    assert ended.code == 0, ended.err
    wandb.teardown()  # as at the end of a process: its own one may still be writing
    [kept] = Path("wandb").glob("offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    for part in ("sewa/heldout_loss", "sewa/baseline", "a-project", "sewa/weight_at"):
        assert part.encode() in content
    pictures = [*Path("wandb").glob("offline-run-*/files/media/images/*.png")]
    assert len(pictures) >= 3


@pytest.mark.breadth
@pytest.mark.usefixtures("wandb")
def test_what_weights_and_biases_raises_is_no_bug_of_ours_and_costs_no_result(sewa):
    ended = sewa("select", "-o", "out.safetensors", "--log", "wandb:not/a project?")
    assert ended.code == 4
    assert "wandb() raised" in ended.error
    assert Path("out.safetensors").exists()
