"""An Average is made in one place, is never changed, and comes back from its recipe."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import train_tiny
from safetensors.torch import load_file, save_file

from sewa_cli.checkpoints import Checkpoint, Reads, open_checkpoint
from sewa_cli.config import Config
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, write_results
from sewa_cli.output.sources import Places
from sewa_cli.report.part import Part


@pytest.fixture
def run(tmp_path: Path) -> list[Checkpoint]:
    """Steps 10 to 40, each with a counter."""
    paths = train_tiny(tmp_path / "ckpts", k=4)
    for n, path in enumerate(paths):
        save_file({**load_file(path), "count": torch.tensor(n)}, path)
    return [open_checkpoint(path, Reads()) for path in paths]


def test_what_has_no_weight_is_dropped_and_the_rest_goes_by_step(run: list[Checkpoint]) -> None:
    average = Average.of(run[::-1], [0.25, 0.0, 0.75, 0.0], method="mine", K=2)
    assert [c.step for c in average.sources] == [20, 40]
    assert average.coefficients == (0.75, 0.25)
    assert int(dict(average.tensors())["count"]) == 3  # of the newest
    about = dict(average.metadata)
    assert about.pop("sewa_version")
    assert about == {
        "format": "pt",
        "sewa_method": "mine",
        "sewa_K": "2",
        "sewa_steps": "20,40",
        "sewa_coefficients": "0.75,0.25",
    }


def test_an_average_is_frozen_and_changes_are_new_ones(run: list[Checkpoint]) -> None:
    average = Average.of(run, [0.25] * 4, {"model.bias": "0.bias", "n": "count"}, method="uniform")
    with pytest.raises(FrozenInstanceError):
        average.dtype = "float16"  # type: ignore[misc]
    bias = np.ones(run[0].tensors["0.bias"].shape, np.float32)
    changed = average.with_statistics({"model.bias": bias})
    assert not average.replaced
    assert torch.equal(dict(changed.tensors())["model.bias"], torch.from_numpy(bias))
    assert changed.as_written("file") is changed
    theirs = changed.as_written("folder")
    assert theirs.names == {name: name for name in run[0].tensors}
    assert theirs.replaced.keys() == {"0.bias"}


def test_an_average_comes_back_from_its_recipe(run: list[Checkpoint], tmp_path: Path) -> None:
    statistics = {"0.bias": np.ones(run[0].tensors["0.bias"].shape, np.float16)}
    average = Average.of(
        run, [0.1, 0.2, 0.3, 0.4], config=Config(output_dtype="float16"), method="ema"
    )
    average = average.with_statistics(statistics)
    again = Average.from_recipe(average.recipe(), Places((tmp_path,)))
    for name, one in (("one", average), ("two", again)):
        write_results(one, Outputs(tmp_path / name), lambda: None)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_report_without_an_average_leaves_an_older_average_alone(tmp_path: Path) -> None:
    """As of a comparison that found no best row."""
    older, report = tmp_path / "best.safetensors", tmp_path / "best.report.json"
    older.write_text("older")
    outputs = Outputs(older, report, force=True)
    write_results(None, outputs, Part)
    assert older.read_text() == "older"
    assert report.read_text() == "{}\n"
