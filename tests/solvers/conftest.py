"""The tiny run with the default solver."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def plain_run(run_dir: Path) -> Path:
    """The working directory of a user who chooses by the defaults."""
    (run_dir / "sewa.yaml").write_text("task: ./task.py\ncheckpoints: ckpts/\ndevice: cpu\n")
    return run_dir
