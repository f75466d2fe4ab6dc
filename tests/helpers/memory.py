"""A task with large weights, and a program that measures what the command needs for it."""

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
def watch():
    while on[0]:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
code = main(sys.argv[1:])
on[0] = False
thread.join()
print(peak[0] - base, file=sys.stderr)
sys.exit(code)
"""
