"""Rows in two sets of data at once are told, wherever the sets meet the user."""

from pathlib import Path

import pytest
import torch

from sewa_cli.objective import overlap

ALL_TRAINED = "\n\ndef training_data():\n    return selection_data()\n"
ALL_HELDOUT = "\n\ndef heldout_data():\n    return selection_data()\n"


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (ALL_TRAINED, "300 of the 300 selection examples looked at are in training"),
        (ALL_HELDOUT, "are in heldout_data too: the held-out loss is not held out"),
    ],
)
def test_validate_reports_rows_of_two_sets(sewa, more, told):
    before = sewa("validate")
    assert "selection examples looked at" not in before.err
    Path("task.py").write_text(Path("task.py").read_text() + more)
    ended = sewa("validate")
    assert ended.code == 0, ended.err
    assert told in ended.err


@pytest.mark.usefixtures("run_dir")
def test_training_data_that_cannot_be_read_do_not_stop_a_run(sewa):
    """Nothing else needs them here, and a courtesy is no reason to stop."""
    broken = "\n\ndef training_data():\n    yield 1\n    raise OSError('the disk is gone')\n"
    Path("task.py").write_text(Path("task.py").read_text() + broken)
    ended = sewa("validate")
    assert ended.code == 0, ended.err


class Shuffled:
    """A loader with a generator of its own, or with torch's."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(torch.randperm(100, generator=self.generator).split(10))


def test_data_that_change_from_pass_to_pass_are_told():
    own, seeded_by_us = Shuffled(torch.Generator()), Shuffled(None)
    told, *_ = overlap.find_overlap(seeded_by_us, own, None, 0)
    assert told.startswith("heldout_data gives other examples or another order in each pass")
    assert not list(overlap.find_overlap(seeded_by_us, None, None, 0))


def test_a_few_twins_in_real_data_are_no_reason_to_warn():
    x = torch.randn(1000, 3)
    keys = overlap.row_keys([x])
    assert overlap.shared(keys, [x[:9]]) == 0
    assert overlap.shared(keys, [x[:10]]) == 10


TEXTS = [f"text {n}" for n in range(50)]


@pytest.mark.parametrize(
    ("inputs", "told"),
    [(torch.randn(50, 2), 1), (TEXTS, 1), (["a text"] * 50, 0), ([object()] * 50, 0)],
)
def test_rows_that_cannot_be_told_apart_say_nothing(inputs, told):
    """Labels alone are in every set, and an object has no bytes."""
    data = [(inputs, torch.arange(50) % 2)]
    assert len(list(overlap.find_overlap(data, data, None, seed=0))) == told
