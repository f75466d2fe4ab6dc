"""The device that is not the CPU, in a process of its own: it would change torch for all others."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.shells import environment

TESTS = Path(__file__).with_name("on_standin.py")


@pytest.mark.parametrize(
    "which", [[], pytest.param(["--breadth", "-m", "breadth"], marks=pytest.mark.breadth)]
)
def test_everything_is_on_the_device_that_should_be(which):
    command = [sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *which, "-p", "no:xdist"],
        capture_output=True,
        text=True,
        cwd=TESTS.parents[2],
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout
