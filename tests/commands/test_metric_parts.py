"""`--metric`: parts that are not what they seem, and tasks with next to nothing in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny import Sewa

from sewa_cli.comparison import evaluator
from sewa_cli.objective.board import Average
from sewa_cli.session.metric import Metric
from sewa_cli.session.run import PlacedRun
from sewa_cli.task.scoring import Score

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
    assert "27 of the 30 parts to choose by are listed before, and count once" in ended.err
    assert "1 held-out parts are among those to choose by" in ended.err
    contest = json.loads(Path("o.report.json").read_text())["contest"]
    assert (contest["parts"], contest["heldout_parts"], contest["crowned"]) == (3, 2, None)
    assert json.loads(sewa("validate", "--format", "json").out)["heldout_data"]


def test_copies_are_told_of_parts_that_are_nests(write: Path, sewa: Sewa) -> None:
    parts = "[{'seed': [n % 40, torch.ones(2)]} for n in range(60)]"
    write.write_text(HEAD + SCORE + f"def score_parts():\n    return {parts}\n")
    ended = sewa("select")
    assert "20 of the 60 parts to choose by are listed before, and count once" in ended.err


@pytest.mark.parametrize(
    ("listed", "left"), [(4, 2), (28, 14), (29, 25), (39, 25), (50, 25), (80, 40)]
)
def test_without_held_out_parts_some_are_kept_aside_and_it_says_so(
    write: Path, sewa: Sewa, listed: int, left: int
) -> None:
    """Half of them, but as many are left as can show a lead to be no luck."""
    write.write_text(HEAD + SCORE + f"def score_parts():\n    return range({listed})\n")
    ended = sewa("select")
    said = f"no held-out parts: {listed - left} of the {listed} to choose by are kept aside"
    assert said in ended.err
    contest = json.loads(Path("o.report.json").read_text())["contest"]
    assert (contest["parts"], contest["heldout_parts"]) == (left, listed - left)


def test_a_score_that_ignores_its_part_is_one_part(write: Path, sewa: Sewa) -> None:
    """Then the lead over ten parts is no better shown than that over one."""
    write.write_text(HEAD + SCORE + "def score_parts():\n    return range(100)\n")
    ended = sewa("select", "--budget", 200, "--incumbent", "uniform")
    assert "score() gives an average the same on every part" in ended.err
    contest = json.loads(Path("o.report.json").read_text())["contest"]
    assert contest["crowned"] is None
    assert contest["leader"] == next(iter(contest["scores"]))
    assert "too few to confirm it" in ended.err


def test_metrics_that_may_look_at_held_out_rows_are_told_of(write: Path, sewa: Sewa) -> None:
    rows = "[(torch.randn(8, 6), torch.zeros(8).long())]"
    write.write_text(
        HEAD
        + "def metrics(model):\n    return {'size': norm(model)}\n"
        + f"def selection_data():\n    return {rows}\n"
        + f"def heldout_data():\n    return {rows}\n"
        + "def loss(outputs, batch):\n    return nn.functional.cross_entropy(outputs, batch[1])\n"
    )
    assert "if it looks at held-out rows, their loss is too good now" in sewa("select").err


def test_an_exception_is_told_with_the_line_that_raised_it(write: Path, sewa: Sewa) -> None:
    text = HEAD + "def score(model, part):\n    assert part < 0, 'too large'\n"
    write.write_text(text + "def score_parts():\n    return range(30)\n")
    ended = sewa("select")
    assert ended.code == 4
    line = text.splitlines().index("    assert part < 0, 'too large'") + 1
    assert f"score() raised AssertionError: too large (task.py, line {line})" in ended.error


def test_compare_without_a_loss_leaves_out_what_needs_one(write: Path, sewa: Sewa) -> None:
    write.write_text(HEAD + SCORE + "def score_parts():\n    return range(60)\n")
    ended = sewa("compare", "--json")
    assert ended.code == 0
    methods = {row["method"] for row in json.loads(ended.out)["rows"]}
    assert {"race", "last", "uniform", "latest", "ema"} <= methods
    assert methods.isdisjoint({"aggregate", "greedy", "sewa"})


def test_compare_closes_its_workers_and_those_with_which_memory_ran_out(
    write: Path, sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    write.write_text(HEAD + SCORE + "def score_parts():\n    return range(8)\n")
    opened, closed = list[Metric](), list[Metric]()
    make, score = evaluator.open_metric, Metric.score_heldout

    def open_one(run: PlacedRun) -> Metric:
        assert closed == opened
        opened.append(make(run))
        return opened[-1]

    def run_out_once(metric: Metric, average: Average) -> list[Score] | None:
        if metric is opened[0]:
            raise MemoryError
        return score(metric, average)

    monkeypatch.setattr(evaluator, "open_metric", open_one)
    monkeypatch.setattr(Metric, "score_heldout", run_out_once)
    monkeypatch.setattr(Metric, "close", lambda metric: closed.append(metric))
    ended = sewa("compare", "--methods", "last,uniform")
    assert ended.code == 0, ended.err
    assert len(opened) == 2
    assert closed == opened


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
