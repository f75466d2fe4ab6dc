"""A full disk, calls that fail, a poor file system.

Whatever a run is short of, it says so in one line, and no output is half.
"""

import errno

import pytest

from faults.cases import Case
from faults.inject import LACKING
from faults.sweep import errors, kills

FORMS = [
    Case("average", "file", "file"),
    Case("average", "folder"),
    Case("average", "folder", "folder"),
    Case("average", "shards", "three shards"),
]
FORCED = [case for case in FORMS if case.over is not None]


@pytest.mark.parametrize("case", FORCED, ids=str)
def test_a_disk_that_is_full_at_any_point_is_told_in_one_line(stage, case):
    assert errors(stage, case, errno.ENOSPC, for_good=True, every=3).faults == []


@pytest.mark.parametrize("case", FORCED, ids=str)
def test_a_call_that_fails_at_any_point_is_told_in_one_line(stage, case):
    assert errors(stage, case, errno.EIO, for_good=False, every=3).faults == []


POOR = [[one] for one in LACKING] + [list(LACKING)]


@pytest.mark.parametrize("lacking", POOR, ids="+".join)
def test_what_a_poorer_file_system_does_not_promise_is_little(stage, lacking):
    """Never a mixture. Without locks the leftovers of the dead cannot be told from the living's."""
    for case in FORCED:
        tally = kills(stage, case, every=4, lacking=lacking)
        assert tally.mixtures == []
        assert "flock" in lacking or tally.litter == []
        assert tally.other == []
