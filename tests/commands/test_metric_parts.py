"""`--metric`: parts that are not what they seem, and tasks with next to nothing in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny import Sewa

HEAD = """
import os, time
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def norm(model):
    return float(sum(p.norm() for p in model.parameters()))
"""
SCORE = """
def score(model, part):
    return norm(model)
"""


@pytest.fixture
def write(run_dir: Path) -> Path:
    (run_dir / "sewa.yaml").write_text(
        "task: ./task.py\ncheckpoints: ckpts/\ndevice: cpu\noutput: o.safetensors\n"
        "objective: {metric: size, budget: 60}\n"
    )
    return run_dir / "task.py"


def test_metrics_alone_are_enough(write: Path, sewa: Sewa) -> None:
    write.write_text(HEAD + "def metrics(model):\n    return {'size': norm(model)}\n")
    assert sewa("select").code == 0
    contest = json.loads(Path("o.report.json").read_text())["contest"]
    assert contest["parts"] == 1
    ended = sewa("select", "--set", "objective.metric=null", "-o", "other.safetensors")
    assert ended.code == 4
    assert "task.py has no loss(outputs, batch), and this needs one" in ended.error


def test_metrics_do_not_excuse_half_a_loss(write: Path, sewa: Sewa) -> None:
    write.write_text(
        HEAD
        + "def metrics(model):\n    return {'size': norm(model)}\n"
        + "def selection_data():\n    return [(torch.randn(8, 6), torch.zeros(8).long())]\n"
    )
    ended = sewa("select", "--set", "objective.metric=null")
    assert ended.code == 4
    assert "task.py lacks loss(outputs, batch)" in ended.error


@pytest.mark.parametrize("name", ["", "-"])
def test_a_metric_has_a_name(write: Path, sewa: Sewa, name: str) -> None:
    write.write_text(HEAD + SCORE + "def score_parts():\n    return range(30)\n")
    ended = sewa("select", f"--metric={name}")
    assert ended.code == 2
    assert "metric: must have a name" in ended.error


def test_parts_that_are_the_same_are_told(write: Path, sewa: Sewa) -> None:
    write.write_text(
        HEAD
        + SCORE
        + "def score_parts():\n    return [1, 2, 3] * 10\n"
        + "def heldout_parts():\n    return [3, 4]\n"
    )
    ended = sewa("select")
    assert ended.code == 0
    assert "27 of the 30 parts to choose by are listed before" in ended.err
    assert "1 held-out parts are among those to choose by" in ended.err


def test_a_list_that_changes_from_process_to_process_is_refused(write: Path, sewa: Sewa) -> None:
    write.write_text(
        HEAD + SCORE + "def score_parts():\n    return [os.getpid() + n for n in range(30)]\n"
    )
    ended = sewa("select", "--workers", 2)
    assert ended.code == 4
    assert "task.py: lists other parts in a worker" in ended.error
    assert not Path("o.safetensors").exists()


def test_processes_are_ready_before_the_clock_of_a_time_budget_starts(
    write: Path, sewa: Sewa
) -> None:
    """Importing the task takes longer than the budget."""
    write.write_text(
        "import time\ntime.sleep(2)\n" + HEAD + SCORE + "def score_parts():\n    return range(40)\n"
    )
    ended = sewa("select", "--workers", 2, "--budget", "2s")
    assert ended.code == 0, ended.err
    contest = json.loads(Path("o.report.json").read_text())["contest"]
    assert contest["evaluations"] > 50
