"""The demo: real digits, a real run, and a claim that is checked on three seeds."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from helpers.once import Demo
from helpers.tiny import Sewa
from safetensors.torch import load_file

from sewa_cli.demo import run_demo
from sewa_cli.events import Events


def test_the_learned_average_beats_the_last_checkpoint_on_held_out_digits(tmp_path: Path) -> None:
    """The learned average beats the last checkpoint on each seed, in the mean clearly."""
    ahead = []
    for seed in range(1, 4):
        report = run_demo(tmp_path / f"demo {seed}", seed, Events()).report
        assert report.k == 100
        assert report.config["solver"] == "aggregate"
        weights = [candidate.weight for candidate in report.candidates]
        assert sum(weight or 0 for weight in weights) == pytest.approx(1)
        assert report.selected == [i for i, weight in enumerate(weights) if weight]
        assert len(report.selected) > 1
        last = report.references["last"].heldout_loss
        assert last is not None
        assert report.average.heldout_loss is not None
        ahead.append(last / report.average.heldout_loss)
    assert sum(ahead) / len(ahead) > 1.4
    assert min(ahead) > 1.2


def test_the_demo_trains_to_the_same_checkpoints_on_every_processor(demo: Demo) -> None:
    newest = load_file(demo.folder / "ckpts" / "step-3000.safetensors")
    found = sha256(b"".join(newest[name].numpy().tobytes() for name in sorted(newest)))
    assert found.hexdigest()[:16] == "59a262ec1407de8e"


def test_the_demo_leaves_a_folder_that_the_next_commands_work_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = sewa("demo", "here")
    assert ended.code == 0, ended.err
    report = json.loads(Path("here/demo.report.json").read_text())
    weighed = [c["path"] for c in report["candidates"] if c["weight"]]
    assert ended.out.splitlines() == weighed
    said = [line for line in ended.err.splitlines() if not line.startswith("training")]
    starts = ("held-out loss 0.", "accuracy 0.", "best baseline: ", "vs best baseline (", "wrote ")
    for line, start in zip(said, starts, strict=False):
        assert line.startswith(start)
    assert len(list(Path("here/ckpts").glob("*.safetensors"))) == 100
    monkeypatch.chdir("here")
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
