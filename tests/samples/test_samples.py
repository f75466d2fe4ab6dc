"""The sample configs run as their README says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sewa_cli.extensions import load_settings

SAMPLES = Path(__file__).parents[2] / "sample_configs"


def train_sample(monkeypatch):
    """In a process of its own: a sample may read its data off the modules that are loaded."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*/sewa.yaml")), ids=lambda p: p.parent.name)
def test_every_key_of_a_sample_config_is_known(path):
    assert load_settings(path, {}).checkpoints


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("sample", "checkpoints", "flags"),
    [
        ("huggingface_causal_lm", 25, ["--set", "args.limit=60"]),
        ("huggingface_sequence_classification", 30, ["--set", "args.limit=150"]),
        ("classification_npz", 30, ["--set", "args.limit=150"]),
        ("digits_batchnorm", 30, []),
    ],
)
def test_a_sample_runs(sample, checkpoints, flags, tmp_path, monkeypatch, sewa):
    readme = SAMPLES / sample / "README.md"
    if readme.exists():
        assert "$ python train.py\n$ sewa select\n" in readme.read_text()
    made = shutil.ignore_patterns("ckpts", "data", "model", "trainer", "averaged*")
    shutil.copytree(SAMPLES / sample, tmp_path / "run", ignore=made)
    monkeypatch.chdir(tmp_path / "run")
    train_sample(monkeypatch)
    # fewer rows and iterations than the sample has, to be quick
    ended = sewa("select", "--json", "--set", "gumbel.iterations=20", *flags)
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["k"] == checkpoints
    assert (report["batchnorm"] is not None) == (sample == "digits_batchnorm")
    average, last = report["average"], report["references"]["last"]
    assert average["selection_loss"] < 1.05 * last["selection_loss"]
    # training a tokenizer is not the same each time, and on so few rows neither are these
    assert average["heldout_loss"] < 1.1 * last["heldout_loss"]
