"""A few hundred damaged and forged files; `make fuzz N=100000` takes more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from faults import fuzz

CASES = 330  # thirty of each kind


@pytest.mark.breadth
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are forked and watched")
def test_no_damaged_or_forged_file_gets_more_than_one_line_out_of_sewa(tmp_path: Path) -> None:
    """In a process of its own: children are forked from it, and this one has threads."""
    ended = subprocess.run(
        [sys.executable, fuzz.__file__, "--n", str(CASES), "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{CASES} cases" in ended.stdout


@pytest.mark.parametrize(
    ("code", "said", "left", "why"),
    [
        (1, "error: a bug in sewa: x", None, "exit code 1"),
        (3, "error: a\nTraceback (most recent call last):", None, "traceback"),
        (3, "error: \x1b[31m", None, "control characters"),
        (3, "", None, "with 0 errors"),
        (3, "error: x", "out.safetensors", "left"),
        (0, "wrote out.safetensors", "out.safetensors", "not whole"),
        (0, "wrote out.safetensors", ".out.tmp", "left"),
        (3, "error: " + "x" * 3000, None, "without end"),
        (3, "error: x", None, None),
    ],
)
def test_what_must_not_be_is_found(
    tmp_path: Path, code: int, said: str, left: str | None, why: str | None
) -> None:
    case = fuzz.Case(0, "set", {}, [])
    if left is not None:
        (tmp_path / left).write_bytes(b"half")
    found = fuzz.fault_of(case, fuzz.Ended(code, said), tmp_path)
    assert (found is None) == (why is None)
    assert why is None or why in str(found)
