"""The demo: real digits, a real run, and a claim that is checked on five seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny import Sewa

from sewa_cli.demo import run_demo
from sewa_cli.events import Events


@pytest.mark.parametrize("seed", range(5))
def test_the_learned_average_beats_the_last_checkpoint_on_held_out_digits(
    tmp_path: Path, seed: int
) -> None:
    report = run_demo(tmp_path / "demo", seed, Events()).report
    assert report.k == 100
    assert len(report.selected) == 10
    assert report.average.heldout_loss is not None
    last = report.references["last"].heldout_loss
    assert last is not None
    assert report.average.heldout_loss < last


def test_the_demo_leaves_a_folder_that_the_next_commands_work_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = sewa("demo", "here")
    assert ended.code == 0, ended.err
    assert len(ended.out.splitlines()) == 10
    for name in ("learned", "last", "uniform", "lawa", "held-out loss", "accuracy", "try next"):
        assert name in ended.err
    assert len(list(Path("here/ckpts").glob("*.safetensors"))) == 100
    monkeypatch.chdir("here")
    commands = [line.strip() for line in ended.err.splitlines() if " select ckpts/ " in line]
    assert len(commands) == 3
    for command in commands:
        program = command.partition("|")[0].split()
        assert sewa(*program[program.index("select") :]).code == 0, command
    monkeypatch.chdir(tmp_path)
    again = sewa("demo", "here")
    assert again.code == 3
    assert "exists; use --force" in again.error
