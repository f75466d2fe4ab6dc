"""The sample that generates: its texts, its scores, a tiny run."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sewa_cli.task import load_task

pytest.importorskip("sacrebleu")
FOLDER = Path(__file__).parents[2] / "sample_configs" / "generation"


@pytest.fixture
def task(monkeypatch):
    """Other samples have a task.py too."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("task", "words"):
        sys.modules.pop(name, None)
    yield importlib.import_module("task")
    for name in ("task", "words"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("task")
def test_a_tiny_run_is_scored_by_what_it_generates(tmp_path):
    options = ["--steps", "4", "--checkpoints", "2", "--every", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, FOLDER / "train.py", *options], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-2.safetensors",
        "step-4.safetensors",
    }
    loaded = load_task(str(FOLDER / "task.py"), {"answers": 5})
    parts = loaded.scoring.parts.list()
    assert (len(parts), len(loaded.scoring.heldout.list())) == (80, 200)
    model = loaded.build_model().eval()
    model.load_state_dict(load_file(tmp_path / "step-4.safetensors"))
    [found] = loaded.scoring.score(model, parts[:1])
    assert found.keys() == {"bleu", "chrf", "exact_match"}
    assert all(0 <= value <= 100 for value in found.values())
    assert loaded.scoring.score(model, parts[:3])[0] == found  # whatever else is scored
    batch = next(iter(loaded.selection_data))
    with torch.no_grad():
        assert float(loaded.loss(loaded.predict(model, batch), batch)) > 0
