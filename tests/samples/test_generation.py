"""The sample that generates: its texts, its scores, a tiny run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from sewa_cli.task import load_task

pytest.importorskip("sacrebleu")
FOLDER = Path(__file__).parents[2] / "sample_configs" / "generation"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Other samples have a task.py too."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("task", "words"):
        sys.modules.pop(name, None)
    yield importlib.import_module("task")
    for name in ("task", "words"):
        sys.modules.pop(name, None)


def test_numbers_are_read_as_they_are_said(task: ModuleType) -> None:
    words = sys.modules["words"]
    assert words.number(105_012) == "one hundred and five thousand and twelve"
    assert words.number(340) == "three hundred and forty"
    assert (words.ordinal(21), words.ordinal(12)) == ("twenty first", "twelfth")
    assert [words.year(n) for n in (1905, 1800, 2007, 1984)] == [
        "nineteen oh five",
        "eighteen hundred",
        "two thousand and seven",
        "nineteen eighty four",
    ]
    assert words.clock(23, 45) == "quarter to twelve in the evening"
    assert words.clock(14, 35) == "twenty five to three in the afternoon"
    parts = words.pairs()
    assert [len(rows) for rows in parts.values()] == [1000, 400, 1000]
    assert len({written for rows in parts.values() for written, _ in rows}) == 2400
    for rows in parts.values():
        assert {word for _, read in rows for word in read.split()} <= {*task.WORDS}
        assert max(len(read.split()) for _, read in rows) < task.LONGEST


def test_a_right_answer_scores_all_and_a_wrong_one_less(task: ModuleType) -> None:
    right = [read for _, read in task.score_parts()[0]]
    best = task.compared(right, right)
    assert best == {"bleu": pytest.approx(100), "chrf": pytest.approx(100), "exact_match": 1.0}
    worse = task.compared([*right[1:], "zero"], right)
    assert all(0 <= worse[name] < value / 2 for name, value in best.items())


@pytest.mark.usefixtures("task")
def test_a_tiny_run_is_scored_by_what_it_generates(tmp_path: Path) -> None:
    options = ["--steps", "4", "--checkpoints", "2", "--every", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, FOLDER / "train.py", *options], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-2.safetensors",
        "step-4.safetensors",
    }
    loaded = load_task(str(FOLDER / "task.py"), {"answers": 5})
    assert loaded.scoring is not None
    assert loaded.scoring.parts is not None
    assert loaded.scoring.heldout is not None
    parts = loaded.scoring.parts.list()
    assert (len(parts), len(loaded.scoring.heldout.list())) == (80, 200)
    model = loaded.build_model().eval()
    model.load_state_dict(load_file(tmp_path / "step-4.safetensors"))
    [found] = loaded.scoring.score(model, parts[:1])
    assert found.keys() == {"bleu", "chrf", "exact_match"}
    assert all(0 <= value <= 100 for value in found.values())
    assert loaded.scoring.score(model, parts[:3])[0] == found  # whatever is beside it
    batch = next(iter(loaded.selection_data))
    with torch.no_grad():
        assert float(loaded.loss(loaded.predict(model, batch), batch)) > 0
