"""The command in a process of its own, as a shell starts it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run under bash with pipefail, the venv's commands first on the PATH, one torch thread."""
    return subprocess.run(
        ["bash", "-c", "set -o pipefail\n" + script],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def standard_input(text: str) -> io.TextIOWrapper:
    """Return a stream to replace `sys.stdin`."""
    return io.TextIOWrapper(io.BytesIO(os.fsencode(text)))


def environment() -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
