"""YAML that would hang or crash its reader: one line, exit code 2, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.tiny import Sewa

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGED = "m0: &m0 {k: 1}\n" + "".join(
    f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, 9)
)
VALUES = {
    "!!timestamp x": "is no timestamp",
    "2001-99-99": "is no timestamp",
    "!!bool x": "is no bool",
    "!!int x": "is no int",
    "!!map x": "expected a mapping",
    "[" * 3000 + "]" * 3000: "levels deep",
    "[" * 100_000: "levels deep",
    "{a: " * 3000 + "}" * 3000: "levels deep",
    "&a [*a]": "holds itself",
    "&a {b: *a}": "holds itself",
    "9" * 400: "2^64",
    "9" * 5000: "is no int",
    "0x" + "f" * 9999: "2^64",
    "1:" * 5000 + "1": "2^64",
    '"a\\0b"': "NUL",
    '"\\ud800"': "half a character",
}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
@pytest.mark.parametrize("by", ["file", "--set"])
def test_a_value_that_is_none_is_one_line(tmp_path: Path, sewa: Sewa, value: str, by: str) -> None:
    (tmp_path / "c.yaml").write_text(f"args: {value}\n" if by == "file" else "")
    given = [] if by == "file" else ["--set", f"args={value}"]
    start = time.monotonic()
    ended = sewa("methods", "--config", tmp_path / "c.yaml", *given)
    assert time.monotonic() - start < 5
    assert ended.code == 2, ended.err
    assert VALUES[value] in ended.error
    assert len(ended.error) < 400


@pytest.mark.parametrize("bomb", [BOMB, MERGED])
def test_few_lines_that_stand_for_millions_of_values_are_refused(
    tmp_path: Path, sewa: Sewa, bomb: str
) -> None:
    (tmp_path / "c.yaml").write_text("args:\n" + "".join(f"  {x}\n" for x in bomb.splitlines()))
    start = time.monotonic()
    ended = sewa("methods", "--config", tmp_path / "c.yaml")
    assert time.monotonic() - start < 5
    assert ended.code == 2
    assert "holds more than 100,000 values" in ended.error


def test_an_alias_may_be_used_as_ever(tmp_path: Path, sewa: Sewa) -> None:
    (tmp_path / "c.yaml").write_text("args: {a: &a [1, 2], b: *a, c: {x: *a, y: *a}}\n")
    assert sewa("methods", "--config", tmp_path / "c.yaml").code == 0


@pytest.mark.parametrize("key", ["checkpoints", "task", "output", "report"])
def test_a_home_that_nobody_has_is_one_line(tmp_path: Path, sewa: Sewa, key: str) -> None:
    (tmp_path / "c.yaml").write_text(f"{key}: ~nosuchuser/x.py\n")
    ended = sewa("methods", "--config", tmp_path / "c.yaml")
    assert ended.code == 2
    assert "~nosuchuser/x.py: there is no such home" in ended.error


def test_a_yaml_without_end_is_not_read(tmp_path: Path, sewa: Sewa) -> None:
    with (tmp_path / "c.yaml").open("wb") as file:
        file.truncate(2**40)
    ended = sewa("methods", "--config", tmp_path / "c.yaml")
    assert ended.code == 2
    assert "is larger than 256.0 KiB" in ended.error


@pytest.mark.parametrize("text", ["memory: " + "9" * 400 + "GiB", "seed: " + "x" * 9999])
def test_a_setting_without_end_is_one_short_line(tmp_path: Path, sewa: Sewa, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    ended = sewa("methods", "--config", tmp_path / "c.yaml")
    assert ended.code == 2
    assert len(ended.error) < 400


def test_a_key_of_a_thousand_parts_is_none(sewa: Sewa) -> None:
    ended = sewa("methods", "--set", f"args.{'a.' * 5000}b=1")
    assert ended.code == 2
    assert "must look like key=value" in ended.error
