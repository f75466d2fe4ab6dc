"""Kills and interrupts at the calls that publish: old, absent or whole new; nothing left.

Here the cases that differ in what they do; `make faults` runs every command, form and signal.
"""

from __future__ import annotations

import os
import signal
from itertools import takewhile
from pathlib import Path

import pytest

from faults.cases import BYSTANDERS, Case, Stage
from faults.judge import files_in
from faults.sweep import interrupts, kills

WHOLLY = [Case("average", "set", "set")]  # every point
PARTLY = [  # every fifth
    Case("average", "file"),
    Case("average", "file", "file"),
    Case("average", "folder", "folder"),
    Case("average", "file", "set"),
    Case("average", "file", "file", "stale"),
    Case("average", "set"),
    Case("average", "set", "file"),
    Case("average", "set", "set of three"),
    Case("average", "folder"),
    Case("average", "folder of shards", "folder"),
    Case("apply", "set", "set", "none"),
    Case("apply", "folder", "folder", "stale"),
]
LEARNING = [  # a few points each
    Case("select", "set", "set"),
    Case("select", "folder", "folder"),
    Case("compare", "file", "file"),
    Case("inspect", "file", "file", "none"),
    Case("init", "file", "file", "none"),
]


@pytest.mark.parametrize("case", [*WHOLLY, *PARTLY], ids=str)
def test_a_kill_at_any_point_leaves_old_none_or_new_and_the_next_run_clears_up(
    stage: Stage, case: Case
) -> None:
    assert kills(stage, case, every=1 if case in WHOLLY else 5).faults == []


@pytest.mark.parametrize("case", [*WHOLLY, *PARTLY], ids=str)
def test_an_interrupt_at_any_point_leaves_all_as_it_was_or_all_done(
    stage: Stage, case: Case
) -> None:
    assert interrupts(stage, case, every=1 if case in WHOLLY else 7, term=False).faults == []


@pytest.mark.parametrize("case", LEARNING, ids=str)
def test_every_command_that_writes_survives_kills_and_interrupts(
    learning: Stage, case: Case
) -> None:
    assert kills(learning, case, every=13).faults == []
    assert interrupts(learning, case, every=17).faults == []


def test_a_run_killed_before_it_publishes_leaves_nothing_at_all(stage: Stage) -> None:
    """Unnamed files vanish with the process that writes them, however many there are."""
    if not has_unnamed_files(stage.out):
        pytest.skip("this file system has no unnamed files")
    for case in (Case("average", "file"), Case("average", "set"), Case("average", "set", "set")):
        before = stage.prepare(case)
        argv = case.argv(force=case.over is not None)
        points = stage.run(argv).points
        first = [point.split()[0] for point in points]
        written = len(list(takewhile(lambda kind: kind in ("open", "write", "fsync"), first)))
        assert "write" in first[:written]
        for at in range(written):
            stage.clear(before)
            ended = stage.run(argv, at=at, when="after", signal=int(signal.SIGKILL))
            assert ended.code == -signal.SIGKILL
            assert files_in(stage.out) == before, f"{case}: killed after {points[at]}"


def has_unnamed_files(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        return False
    return True


def test_after_a_kill_a_run_without_a_name_takes_one_that_is_free(stage: Stage) -> None:
    argv = ["average", "../inputs/files"]
    stage.clear(BYSTANDERS)
    points = stage.run(argv).points
    average = files_in(stage.out)["averaged.safetensors"]
    for at in range(len(points)):
        stage.clear(BYSTANDERS)
        assert stage.run(argv, at=at, signal=int(signal.SIGKILL)).code == -signal.SIGKILL
        was_there = "averaged.safetensors" in files_in(stage.out)
        assert stage.run(argv).code == 0
        names = ["averaged.safetensors", *(["averaged-2.safetensors"] if was_there else [])]
        assert files_in(stage.out) == {**BYSTANDERS, **dict.fromkeys(names, average)}, points[at]
