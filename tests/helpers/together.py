"""Run a command on several ranks of this host, and compare its report with that of one rank."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from helpers.shells import environment
from helpers.tiny import Ended

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def on_ranks(ranks: int, *arguments: object) -> list[str]:
    """Return the command line that runs `sewa` on several ranks of this host."""
    start = [*TORCHRUN, "--nproc-per-node", str(ranks), "--no-python"]
    return [*start, sys.executable, "-m", "sewa_cli", *map(str, arguments)]


def sewa_on(ranks: int, *arguments: object, **more: str) -> Ended:
    """Run a command on several ranks of this host; torchrun's exit code is 0 or 1."""
    ended = subprocess.run(
        on_ranks(ranks, *arguments),
        capture_output=True,
        text=True,
        env={**environment(), **more},
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same choice, and the same losses."""
    assert one["selected"] == other["selected"]
    for name in ("selection_loss", "heldout_loss"):
        assert one["average"][name] == pytest.approx(other["average"][name], rel=1e-5)
    for simple, twin in zip(one["simple"], other["simple"], strict=True):
        assert simple["selection_loss"] == pytest.approx(twin["selection_loss"], rel=1e-5)
