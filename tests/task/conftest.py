"""Modules and paths that a task imports are forgotten after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forget_imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules of one test's folder must not answer for those of another."""
    path, known, here = list(sys.path), set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(here):
            del sys.modules[name]
