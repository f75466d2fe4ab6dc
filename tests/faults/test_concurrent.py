"""Two runs at once in one folder: each output is one run's, or one of them says what is wrong."""

import pytest

from faults.pairs import collide, kinds


@pytest.mark.parametrize("pair", list(kinds()), ids=lambda pair: pair.name)
def test_two_runs_at_once_are_not_mixed(request, pair):
    stage = request.getfixturevalue("learning" if "select" in pair.name else "stage")
    assert collide(stage, pair, [None, 1]).faults == []
