"""The user's model, made ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PAGES, PASSES = 3 * 4 * 5_000_000 // 4096, 10
FAULTS = """
import resource, sys, torch
from sewa_cli.cli import main

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def one_pass():  # as of a model with large activations, which are all gone when it ends
    x = torch.ones(5_000_000)
    y = x + 1
    z = y * 2

assert main(["evaluate", sys.argv[1], "-q"]) == 0
one_pass()
before = faults()
for _ in range(int(sys.argv[2])):
    one_pass()
print(faults() - before, file=sys.stderr)
"""


@pytest.mark.usefixtures("run_dir")
@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is told")
def test_a_pass_finds_the_memory_of_the_one_before() -> None:
    checkpoint = str(min(Path("ckpts").iterdir()))
    command = [sys.executable, "-c", FAULTS, checkpoint, str(PASSES)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stderr.split()[-1]) < PAGES * PASSES / 2
