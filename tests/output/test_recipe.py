"""An Average is made in one place, is never changed, and comes back from its recipe."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import report_of, train_tiny
from safetensors.torch import load_file, save, save_file

from sewa_cli.checkpoints import Reads, open_checkpoint
from sewa_cli.config import Config
from sewa_cli.output.average import Average
from sewa_cli.output.destination import Outputs, write_results
from sewa_cli.output.sources import Places
from sewa_cli.report.shared import Part


@pytest.fixture
def run(tmp_path):
    """Steps 10 to 40, each with a counter."""
    paths = train_tiny(tmp_path / "ckpts", k=4)
    for n, path in enumerate(paths):
        save_file({**load_file(path), "count": torch.tensor(n)}, path)
    return [open_checkpoint(path, Reads()) for path in paths]


def test_what_has_no_weight_is_dropped_and_the_rest_goes_by_step(run):
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


def test_an_average_comes_back_from_its_recipe(run, tmp_path):
    statistics = {"0.bias": np.ones(run[0].tensors["0.bias"].shape, np.float16)}
    average = Average.of(
        run, [0.1, 0.2, 0.3, 0.4], config=Config(output_dtype="float16"), method="ema"
    )
    average = average.with_statistics(statistics)
    again = Average.from_recipe(average.recipe(), Places((tmp_path,)))
    for name, one in (("one", average), ("two", again)):
        write_results(one, Outputs(tmp_path / name), lambda: None)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_report_without_an_average_leaves_an_older_average_alone(tmp_path):
    """As of a comparison that found no best row."""
    older, report = tmp_path / "best.safetensors", tmp_path / "best.report.json"
    older.write_text("older")
    outputs = Outputs(older, report, force=True)
    write_results(None, outputs, Part)
    assert older.read_text() == "older"
    assert report.read_text() == "{}\n"


@pytest.fixture
def report(tmp_path, monkeypatch, sewa):
    """Of three checkpoints with a counter, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for n, path in enumerate(train_tiny(Path("ckpts"), k=3)):
        save_file({**load_file(path), "count": torch.tensor(n)}, path)
    assert sewa("average", "ckpts", "-o", "out.safetensors", "--report", "r.json").code == 0
    return report_of("r.json")


def packed(**tensors):
    return base64.b64encode(save(tensors)).decode()


def source(**values):
    return lambda recipe: recipe["sources"][1].update(values)


def recipe(**values):
    return lambda recipe: recipe.update(values)


def tensors(**names):
    return lambda recipe: recipe["tensors"].update(names)


def renamed(name):
    return lambda recipe: recipe["tensors"].update({name: recipe["tensors"].pop("0.bias")})


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (source(coefficient=5.0), "recipe.sources: the coefficients sum to 5.66667"),
        (source(coefficient=float("nan")), "recipe.sources.1.coefficient: "),
        (source(size=-1), "recipe.sources.1.size: "),
        (source(sha256="Z" * 64), "recipe.sources.1.sha256: "),
        (source(path="x" * 300), "not found"),
        (source(path="a\0b"), "not found"),
        (source(path="."), "its weights are missing"),
        (recipe(sources=[]), "recipe.sources: "),
        (recipe(tensors={}), "recipe.tensors: "),
        (renamed("__metadata__"), "recipe.tensors: a tensor cannot be called __metadata__"),
        (tensors(another="0.bias"), "recipe.tensors: 0.bias is written 2 times"),
        (tensors(another="lost"), "lost: no such tensor"),
        (recipe(dtype="int8"), "recipe.dtype: "),
        (recipe(shard_size=0), "recipe.shard_size: "),
        (recipe(lora="merged"), "recipe.lora: "),
        (recipe(replaced="not base64"), "recipe.replaced: "),
        (recipe(replaced=base64.b64encode(b"[" * 10**5).decode()), "recipe.replaced: "),
        (recipe(replaced=packed(lost=torch.zeros(2))), "recipe.replaced: 'lost' is not in recipe."),
        (
            recipe(replaced=packed(**{"0.bias": torch.zeros(16).half()})),
            "recipe.replaced: 0.bias: ",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_apply_refuses_an_edited_report_by_the_name_of_the_field(report, sewa, edit, field):
    edit(report["recipe"])
    Path("r.json").write_text(json.dumps(report))
    ended = sewa("apply", "r.json", "-o", "again.safetensors")
    assert ended.code == 3, ended.err
    assert field in ended.error
    assert len(ended.error) < 600
    assert not list(Path().glob("again*"))


@pytest.mark.parametrize(
    "header",
    [
        {"0.bias": {"dtype": "F32", "shape": [10**400, 0], "data_offsets": [0, 0]}},
        {"0.bias": {"dtype": "F32", "shape": [-1, -16], "data_offsets": [0, 64]}},
        [],
    ],
)
def test_statistics_of_impossible_shapes_are_refused(report, sewa, header):
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(64)
    report["recipe"]["replaced"] = base64.b64encode(content).decode()
    Path("r.json").write_text(json.dumps(report))
    for command in (["apply", "-o", "again.safetensors"], ["verify"]):
        ended = sewa(*command, "r.json")
        assert ended.code == 3
        assert "recipe.replaced: " in ended.error


def test_weights_may_be_negative_and_need_not_be_equal_if_they_sum_to_one(report, sewa):
    for one, coefficient in zip(report["recipe"]["sources"], (-0.5, 0.25, 1.25), strict=True):
        one["coefficient"] = coefficient
    Path("r.json").write_text(json.dumps(report))
    assert sewa("apply", "r.json", "-o", "again.safetensors").code == 0
    options = ["--weights", "-0.5,0.25,1.25", "-o", "same.safetensors"]
    assert sewa("average", "ckpts", *options).code == 0
    again, same = load_file("again.safetensors"), load_file("same.safetensors")
    assert all(torch.equal(again[name], same[name]) for name in same)


def test_a_state_key_that_a_report_has_wrong_is_told_by_its_field(report, sewa):
    for path in sorted(Path("ckpts").iterdir()):
        torch.save({"model": load_file(path)}, f"{path.stem}.pt")
    files = [f"step-{step}.pt" for step in (10, 20, 30)]
    assert sewa("average", *files, "-o", "pt.safetensors", "--report", "r.json", "-f").code == 0
    report = json.loads(Path("r.json").read_text())
    report["recipe"]["state_key"] = "ema"
    Path("r.json").write_text(json.dumps(report))
    ended = sewa("apply", "r.json", "-o", "again.safetensors")
    assert ended.code == 3
    assert ended.error.startswith("recipe.state_key: ")
