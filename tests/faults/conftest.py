"""One process that forks, and one folder, for all crash tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from faults.cases import Stage
from faults.driver import Driver


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """For commands that need no torch; a process without it forks in half the time."""
    yield from _stage(tmp_path_factory)


@pytest.fixture(scope="session")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """For all others."""
    yield from _stage(tmp_path_factory)


def _stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if sys.platform != "linux":
        pytest.skip("crash tests read /proc and fork")
    with Driver() as driver:
        yield Stage(tmp_path_factory.mktemp("faults") / "stage", driver)
