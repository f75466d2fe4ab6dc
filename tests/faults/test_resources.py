"""A full disk, a read-only folder, few descriptors, little memory, a poor file system, long names.

Whatever a run is short of, it says so in one line, and no output is half.
"""

from __future__ import annotations

import errno
import os

import pytest

from faults.cases import BYSTANDERS, Case, Stage
from faults.inject import LACKING
from faults.judge import files_in
from faults.sweep import errors, kills

FORMS = [
    Case("average", "file", "file"),
    Case("average", "folder"),
    Case("average", "folder", "folder"),
    Case("average", "shards", "three shards"),
]
FORCED = [case for case in FORMS if case.over is not None]


# ---- a full disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FORCED, ids=str)
def test_a_disk_that_is_full_at_any_point_is_told_in_one_line(stage: Stage, case: Case) -> None:
    assert errors(stage, case, errno.ENOSPC, for_good=True, every=3).faults == []


@pytest.mark.parametrize("case", FORCED, ids=str)
def test_a_call_that_fails_at_any_point_is_told_in_one_line(stage: Stage, case: Case) -> None:
    assert errors(stage, case, errno.EIO, for_good=False, every=3).faults == []


# ---- a folder that may not be written to -------------------------------------------------------


# ---- file systems that can do less -------------------------------------------------------------

POOR = [[one] for one in LACKING] + [list(LACKING)]


@pytest.mark.parametrize("lacking", POOR, ids="+".join)
def test_what_a_poorer_file_system_does_not_promise_is_little(
    stage: Stage, lacking: list[str]
) -> None:
    """Never a mixture. Without locks the leftovers of the dead cannot be told from the living's."""
    for case in FORCED:
        tally = kills(stage, case, every=4, lacking=lacking)
        assert tally.mixtures == []
        assert "flock" in lacking or tally.litter == []
        assert tally.other == []


# ---- names -------------------------------------------------------------------------------------


def test_a_name_may_be_as_long_as_the_system_lets_it_be(stage: Stage) -> None:
    longest = os.pathconf(stage.out, "PC_NAME_MAX")
    file, report = ("x" * (longest - len(end)) + end for end in (".safetensors", ".json"))
    folder = "y" * longest
    files, folders = "../inputs/files", "../inputs/folders"
    for argv, names in (
        (["average", files, "-o", file], {file}),
        (
            ["average", files, "-o", "out.safetensors", "--report", report],
            {"out.safetensors", report},
        ),
        (["average", folders, "-o", folder], {folder}),
        (["apply", "../inputs/file.report.json", "-o", file], {file}),
    ):
        for force in ([], ["--force"]):
            if not force:
                stage.clear(BYSTANDERS)
            ended = stage.run([*argv, *force])
            assert ended.code == 0, ended.err
            now = files_in(stage.out)
            assert {name.split("/")[0] for name in now} - BYSTANDERS.keys() == names
