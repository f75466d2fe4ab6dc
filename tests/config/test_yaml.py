"""YAML with a fault in it: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny import Sewa

VALUES = {
    "!!timestamp x": "cannot be read",
    "2001-99-99": "month must be in 1..12",
    "!!map x": "expected a mapping",
    "[" * 3000 + "]" * 3000: "nested too deep",
    "[a": "expected ',' or ']'",
    "9" * 5000: "cannot be read",
    "*nowhere": "found undefined alias",
}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
@pytest.mark.parametrize("by", ["file", "--set"])
def test_a_value_that_is_none_is_one_line(tmp_path: Path, sewa: Sewa, value: str, by: str) -> None:
    (tmp_path / "c.yaml").write_text(f"args: {value}\n" if by == "file" else "")
    given = [] if by == "file" else ["--set", f"args={value}"]
    ended = sewa("methods", "--config", tmp_path / "c.yaml", *given)
    assert ended.code == 2, ended.err
    assert VALUES[value] in ended.error
    assert len(ended.error) < 400


def test_an_alias_may_be_used_as_ever(tmp_path: Path, sewa: Sewa) -> None:
    (tmp_path / "c.yaml").write_text("args: {a: &a [1, 2], b: *a, c: {x: *a, y: *a}}\n")
    assert sewa("methods", "--config", tmp_path / "c.yaml").code == 0


@pytest.mark.parametrize("key", ["checkpoints", "task", "output", "report"])
def test_a_home_that_nobody_has_is_one_line(tmp_path: Path, sewa: Sewa, key: str) -> None:
    (tmp_path / "c.yaml").write_text(f"{key}: ~nosuchuser/x.py\n")
    ended = sewa("methods", "--config", tmp_path / "c.yaml")
    assert ended.code == 2
    assert "~nosuchuser/x.py: there is no such home" in ended.error


@pytest.mark.parametrize("text", ["memory: " + "9" * 400 + "GiB", "seed: " + "x" * 9999])
def test_a_setting_without_end_is_one_short_line(tmp_path: Path, sewa: Sewa, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    ended = sewa("methods", "--config", tmp_path / "c.yaml")
    assert ended.code == 2
    assert len(ended.error) < 400
