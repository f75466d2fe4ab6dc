"""A task with large weights, and how much memory the command takes for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

WIDE_TASK = """
import torch
from torch import nn

def build_model():
    return nn.Linear(1000, 1000)

def selection_data():
    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    return [(x, x)]

def loss(outputs, batch):
    return ((outputs - batch[1]) ** 2).mean()
"""


WATCH = """
import re, sys, threading, time, torch
torch.set_num_threads(1)
from sewa_cli.cli import main
import sewa_cli.commands, sewa_cli.cli.console
def anonymous():
    with open('/proc/self/status') as file:
        return int(re.search(r'RssAnon:\\s+(\\d+)', file.read())[1]) * 1024
base, peak, on = anonymous(), [0], [True]
code = 0
def watch():
    while on[0]:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
for command in sys.argv[1:]:
    peak[0] = 0
    code = code or main(command.split())
    print("peak", peak[0] - base, file=sys.stderr)
on[0] = False
thread.join()
sys.exit(code)
"""


def peaks(commands: Iterable[str]) -> list[int]:
    """Bytes of anonymous memory, at most, in each of some commands, one after the other.

    They run in one process of their own: one leaves to the next what torch keeps of its first use.
    """
    ended = subprocess.run(
        [sys.executable, "-c", WATCH, *commands], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("peak ")]
