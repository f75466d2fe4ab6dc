"""A command on several ranks of this host, and whether it has come to what one comes to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.shells import environment
from helpers.tiny import Ended

SEWA = [sys.executable, "-m", "sewa_cli"]


def sewa_on(ranks: int, *arguments: object, **more: str) -> Ended:
    """A command on so many ranks of this host."""
    command = [*SEWA, *map(str, arguments), "--ranks", str(ranks)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**environment(), **more}, check=False
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def report_of(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same choice, and the same losses."""
    assert one["selected"] == other["selected"]
    for name in ("selection_loss", "heldout_loss"):
        assert one["average"][name] == pytest.approx(other["average"][name], rel=1e-5)
    for simple, twin in zip(one["simple"], other["simple"], strict=True):
        assert simple["selection_loss"] == pytest.approx(twin["selection_loss"], rel=1e-5)
