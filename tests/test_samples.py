"""The sample configs run as their README says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Sewa

SAMPLES = Path(__file__).parent.parent / "sample_configs"


def test_the_batchnorm_sample_trains_and_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    shutil.copytree(
        SAMPLES / "digits_batchnorm", tmp_path / "run", ignore=shutil.ignore_patterns("ckpts")
    )
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    ended = sewa("select")
    assert ended.code == 0, ended.err
    report = json.loads(Path("averaged.report.json").read_text())
    assert report["k"] == 30
    assert report["K"] == 8
    assert report["batchnorm"]["layers"] == 2
    assert report["batchnorm"]["data"] == "training_data"
    assert report["average"]["metrics"]["accuracy"] > 0.95
    assert report["average"]["heldout_loss"] < report["references"]["last"]["heldout_loss"]
