"""Revisions on a hub of our own, read by the real client in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.servers import Counted, Hub
from helpers.tiny import TASK, train_tiny
from safetensors.torch import load_file, save

pytestmark = pytest.mark.breadth


@pytest.fixture
def hub():
    app = Hub()
    for step in (900, 1000, 10_000):
        app.files[f"step{step}"] = {
            "model.safetensors": save({"w": torch.full((50_000,), float(step))}),
            "config.json": b'{"model_type": "x"}',
            "optimizer.bin": b"0" * 10_000,
            "README.md": b"words",
        }
    app.files["main"] = dict(app.files["step10000"])
    server = Counted(app)
    yield app, server
    server.stop()


@pytest.fixture
def run(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments, **environment):
        names = {"HF_ENDPOINT": hub[1].url, "HF_HOME": str(tmp_path / "hf")}
        return subprocess.run(
            [sys.executable, "-m", "sewa_cli", *arguments],
            env={**os.environ, **names, "HF_TOKEN": "", "TMPDIR": str(tmp_path), **environment},
            capture_output=True,
            text=True,
        )

    return call


def test_revisions_are_checkpoints_in_the_order_of_their_numbers(hub, run):
    _, server = hub
    average = ("average", "hf://org/run", "--revisions", "step*", "-o", "best/")
    ended = run(*average, "--last", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["hf://org/run@step1000", "hf://org/run@step10000"]
    assert load_file("best/model.safetensors")["w"][0] == 5500
    assert Path("best/config.json").is_file()
    assert server.gets("optimizer.bin") == server.gets("README.md") == 0
    assert server.gets("model.safetensors") == 3 + 2  # each header, and what takes part
    server.reset()
    assert run(*average, "--last", "2", "--force").returncode == 0
    assert server.gets("model.safetensors") == 3  # the cache has the others
    server.reset()
    offline = run(*average, "--last", "2", "--force", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert not server.asked
    assert load_file("best/model.safetensors")["w"][0] == 5500


@pytest.mark.parametrize("token", ["", "hf_WRONG"])
def test_a_wrong_token_is_one_line_without_it(hub, run, token):
    hub[0].token = "hf_RIGHT"
    ended = run("average", "hf://org/run", "--revisions", "step*", HF_TOKEN=token)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (3, 1), ended.stderr
    assert "check the credentials" in ended.stderr
    assert "hf_" not in ended.stderr
    right = run("average", "hf://org/run", "--revisions", "step*", HF_TOKEN="hf_RIGHT")
    assert right.returncode == 0, right.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hf://org/run", "--revisions", "v*"), "no revision of hf://org/run matches 'v*'"),
        (("hf://org/run@nothing",), "hf://org/run@nothing: no such file or folder"),
        (("hf://org/none",), "hf://org/none: no such file or folder"),
        (("ckpts", "--revisions", "v*"), "is for checkpoints on the hub"),
        (("hf://org/run@step900", "-o", "hf://org/new"), "is read only"),
    ],
)
def test_what_is_not_there_is_one_line(run, arguments, words):
    ended = run("average", *arguments)
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert words in ended.stderr


def test_a_revision_that_moves_meanwhile_is_noticed(hub, run):
    app, server = hub

    def move(request):
        if request.method == "HEAD" and "step1000/model" in request.path:
            app.files["step1000"]["model.safetensors"] = save({"w": torch.zeros(50_001)})

    server.fail = move
    ended = run("average", "hf://org/run", "--revisions", "step*", "-o", "out")
    assert ended.returncode == 3
    assert "hf://org/run@step1000/model.safetensors: changed" in ended.stderr
    assert not Path("out").exists()


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(hub, run):
    from werkzeug.wrappers import Response

    _, server = hub
    server.fail = lambda _: Response("", 503) if len(server.asked) in (9, 12) else None
    ended = run("average", "hf://org/run", "--revisions", "step*", "-o", "out")
    assert ended.returncode == 0, ended.stderr


def test_select_learns_from_revisions_as_from_files(hub, run):
    paths = train_tiny(Path("ckpts"))
    hub[0].files = {path.stem: {"model.safetensors": path.read_bytes()} for path in paths}
    Path("task.py").write_text(TASK)
    options = ("--task", "task.py", "--device", "cpu", "-o")
    ended = run("select", "hf://org/run", "--revisions", "step-*", *options, "hub.safetensors")
    assert ended.returncode == 0, ended.stderr
    assert hub[1].gets("model.safetensors") == 12
    assert run("select", "ckpts", *options, "local.safetensors").returncode == 0
    one, two = load_file("hub.safetensors"), load_file("local.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in two)
    sources = json.loads(Path("hub.report.json").read_text())["recipe"]["sources"]
    assert all(source["path"].startswith("hf://org/run@step-") for source in sources)
