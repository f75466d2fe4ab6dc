"""A few hundred damaged and forged files; `make fuzz N=100000` takes more."""

import subprocess
import sys

import pytest

from faults import fuzz

CASES = 330  # thirty of each kind


@pytest.mark.breadth
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are forked and watched")
def test_no_damaged_or_forged_file_gets_more_than_one_line_out_of_sewa(tmp_path):
    """In a process of its own: children are forked from it, and this one has threads."""
    ended = subprocess.run(
        [sys.executable, fuzz.__file__, "--n", str(CASES), "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{CASES} cases" in ended.stdout
