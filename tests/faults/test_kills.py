"""Kills and interrupts at the calls that publish: old, absent or whole new; nothing left.

Here the cases that differ in what they do; `make faults` runs every command, form and signal.
"""

import pytest

from faults.cases import Case
from faults.sweep import interrupts, kills

CASES = [
    Case("average", "file"),
    Case("average", "file", "file"),
    Case("average", "file", "file", "stale"),
    Case("average", "folder"),
    Case("average", "folder", "folder"),
    Case("average", "folder", "folder", "elsewhere"),
    Case("average", "shards", "three shards"),
    Case("apply", "folder", "folder", "stale"),
    Case("inspect", "file", "file", "none"),
    Case("init", "file", "file", "none"),
]
LEARNING = [  # a few points each
    Case("select", "shards", "shards"),
    Case("compare", "file", "file"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_signal_at_any_point_leaves_old_none_or_new_and_the_next_run_clears_up(stage, case):
    assert kills(stage, case, every=1 if case == CASES[1] else 3).faults == []
    assert interrupts(stage, case, every=7).faults == []


@pytest.mark.parametrize("case", LEARNING, ids=str)
def test_every_command_that_writes_survives_kills_and_interrupts(learning, case):
    assert kills(learning, case, every=7).faults == []
    assert interrupts(learning, case, every=13).faults == []
