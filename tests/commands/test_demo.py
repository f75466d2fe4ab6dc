"""The demo: real digits, a real run, and a folder to go on in."""

import json
import shutil
from hashlib import sha256

import pytest
from safetensors.torch import load_file

from sewa_cli.demo import run_demo
from sewa_cli.events import Events


@pytest.mark.breadth
def test_the_learned_average_beats_the_last_checkpoint_on_three_seeds(tmp_path):
    ahead = []
    for seed in range(1, 4):
        report = run_demo(tmp_path / f"demo {seed}", seed, Events()).report
        last = report.references["last"].heldout_loss
        ahead.append(last / report.average.heldout_loss)
    assert sum(ahead) / len(ahead) > 1.4
    assert min(ahead) > 1.2


def test_the_demo_trains_to_the_same_checkpoints_on_every_processor(demo):
    newest = load_file(demo.folder / "ckpts" / "step-3000.safetensors")
    found = sha256(b"".join(newest[name].numpy().tobytes() for name in sorted(newest)))
    assert found.hexdigest()[:16] == "59a262ec1407de8e"


def test_the_demo_leaves_a_folder_that_the_next_commands_work_in(demo, tmp_path, monkeypatch, sewa):
    ended = demo.ended
    assert ended.code == 0, ended.err
    folder = tmp_path / "here"
    shutil.copytree(demo.folder, folder)
    report = json.loads((folder / "demo.report.json").read_text())
    assert report["k"] == 100
    assert sum(c["weight"] or 0 for c in report["candidates"]) == pytest.approx(1)
    losses = report["references"]["last"]["heldout_loss"], report["average"]["heldout_loss"]
    assert losses[0] > 1.2 * losses[1]
    assert ended.out.splitlines() == [c["path"] for c in report["candidates"] if c["weight"]]
    said = [line for line in ended.err.splitlines() if not line.startswith("training")]
    starts = ("held-out loss 0.", "accuracy 0.", "best baseline: ", "vs best baseline (", "wrote ")
    for line, start in zip(said, starts, strict=False):
        assert line.startswith(start)
    monkeypatch.chdir(folder)
    after = ended.err.splitlines()
    commands = [line.strip() for line in after[after.index("try next:") :] if " ckpts/" in line]
    assert len(commands) == 3
    for command in commands:
        program = command.partition("|")[0].split()
        assert sewa(*program[program.index("ckpts/") - 1 :]).code == 0, command
    monkeypatch.chdir(tmp_path)
    again = sewa("demo", "here")
    assert again.code == 3
    assert "exists; use --force" in again.error
