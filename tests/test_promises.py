"""tests/promises.md names tests that exist and that `make test` runs."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "promises.md").read_text())


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_the_witness_of_a_promise_is_part_of_make_test(module, name):
    found = [
        node
        for node in ast.parse((TESTS / module).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1
    marks = [ast.unparse(mark) for mark in found[0].decorator_list]
    assert "pytest.mark.breadth" not in marks
