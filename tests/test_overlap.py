"""Rows in two sets of data at once are told, wherever the sets meet the user."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Sewa
from hypothesis import given
from hypothesis import strategies as st

from sewa_cli.run import overlap

ALL_TRAINED = "\n\ndef training_data():\n    return selection_data()\n"
ALL_HELDOUT = "\n\ndef heldout_data():\n    return selection_data()\n"


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("command", ["select", "validate", "compare"])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (ALL_TRAINED, "selection rows are in training_data too"),
        (ALL_HELDOUT, "selection rows are in heldout_data too: the held-out loss is not held out"),
    ],
)
def test_rows_of_two_sets_are_told(sewa: Sewa, command: str, more: str, told: str) -> None:
    before = sewa(command, *(("--methods", "last") if command == "compare" else ()))
    assert "selection rows are in" not in before.err
    Path("task.py").write_text(Path("task.py").read_text() + more)
    ended = sewa(command, *(("--methods", "last") if command == "compare" else ()))
    assert ended.code == 0, ended.err
    assert told in ended.err


@pytest.mark.usefixtures("run_dir")
def test_the_choice_is_the_same_with_the_warning(sewa: Sewa) -> None:
    """A shuffling loader draws when rows are looked at; the run has its own seed."""
    chosen = []
    for more in ("", ALL_TRAINED):
        Path("task.py").write_text(Path("task.py").read_text() + more)
        ended = sewa("select", "--json", "-o", f"a{len(more)}.safetensors")
        assert ended.code == 0, ended.err
        chosen.append(Path(f"a{len(more)}.safetensors").read_bytes()[-400:])
    assert chosen[0] == chosen[1]


def batches(x: torch.Tensor, y: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(torch.split(x, size), torch.split(y, size), strict=True))


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 9), st.integers(1, 9))
def test_as_many_are_counted_as_there_are(n: int, common: int, size: int, other: int) -> None:
    """Against the naive twin, in batches of any size and in any order."""
    common = min(n, common)
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    y = torch.arange(n) % 2
    z = torch.cat([x[:common], x + 10]).flip(0)
    w = torch.cat([y[:common], y]).flip(0)
    found = overlap.shared(overlap.row_keys(batches(x, y, size)), batches(z, w, other))
    assert found == common
    assert overlap.shared(overlap.row_keys(batches(x, 1 - y, size)), batches(z, w, other)) == 0


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2, dtype=torch.bool)},
        (np.arange(6.0).reshape(3, 2), ["a", "b", "c"]),
        [torch.arange(6).view(3, 2).bfloat16(), torch.tensor(0.5)],
    ],
)
def test_rows_have_keys_whatever_the_batch_is_made_of(batch: object) -> None:
    assert len(set(overlap.row_keys([batch]))) == 3


def test_a_few_twins_in_real_data_are_no_reason_to_warn() -> None:
    x = torch.randn(1000, 3)
    keys = overlap.row_keys([x])
    assert overlap.shared(keys, [x[:9]]) == 0
    assert overlap.shared(keys, [x[:10]]) == 10


@pytest.mark.parametrize(("inputs", "told"), [(torch.randn(50, 2), 1), (["a text"] * 50, 0)])
def test_rows_that_cannot_be_told_apart_say_nothing(inputs: object, told: int) -> None:
    """Texts as strings leave labels alone to compare, and those are in every set."""
    data = [(inputs, torch.arange(50) % 2)]
    warnings: list[str] = []
    bench = SimpleNamespace(
        task=SimpleNamespace(selection_data=data, heldout_data=data, training_data=None),
        config=SimpleNamespace(seed=0),
        warn=warnings.append,
    )
    overlap.warn_of_overlap(bench)  # type: ignore[arg-type]
    assert len(warnings) == told
