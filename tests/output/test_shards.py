"""--shard-size: a folder with weights split in the Hugging Face style."""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.tiny import train_tiny
from safetensors import safe_open
from safetensors.torch import load_file

from sewa_cli.config import load_config
from sewa_cli.output import average as recipe

SIZE = 450  # bytes; the tiny network has 64 + 384 and 8 + 128
REPORT = "sewa.report.json"
INDEX = "model.safetensors.index.json"
SHARDS = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
FOLDER = {"README.md", INDEX, *SHARDS}


@pytest.fixture
def ckpts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [path.relative_to(tmp_path) for path in train_tiny(tmp_path / "ckpts", k=4)]


def load_folder(folder):
    """Load weights as transformers does: by the index alone."""
    weight_map = json.loads(Path(folder, INDEX).read_text())["weight_map"]
    found = {}
    for name, file in weight_map.items():
        with safe_open(Path(folder, file), framework="pt") as shard:
            found[name] = shard.get_tensor(name)
    return found


def inside(folder):
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 500 * 10**6), ("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5 kb", 1500), ("77", 77)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert load_config(None, {"shard_size": text}).shard_size == size


@pytest.mark.usefixtures("ckpts")
def test_a_large_output_is_a_folder_of_shards_with_an_index(sewa):
    assert sewa("average", "ckpts", "-o", "one.safetensors").code == 0
    ended = sewa("average", "ckpts", "-o", "out", "--shard-size", SIZE, "--report", f"out/{REPORT}")
    assert ended.code == 0, ended.err
    assert "wrote out: " in ended.err
    assert inside("out") == {*FOLDER, REPORT}
    index = json.loads(Path("out", INDEX).read_text())
    assert index["metadata"] == {"total_size": 584}
    assert set(index["weight_map"].values()) == SHARDS
    whole, found = load_file("one.safetensors"), load_folder("out")
    assert whole.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    for shard in SHARDS:
        with safe_open(Path("out", shard), framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["sewa_method"] == "uniform"


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize("size", [SIZE, 584])
def test_apply_rebuilds_the_folder_or_makes_one_file_of_it(sewa, size):
    assert sewa("average", "ckpts", "-o", "one.safetensors").code == 0
    report = ["--report", f"out/{REPORT}"]
    assert sewa("average", "ckpts", "-o", "out", "--shard-size", size, *report).code == 0
    ended = sewa("apply", f"out/{REPORT}", "-o", "again")
    assert ended.code == 0, ended.err
    assert "wrote again" in ended.err
    weights = inside("out") - {"README.md", REPORT}
    assert weights == (FOLDER - {"README.md"} if size == SIZE else {"model.safetensors"})
    assert inside("again") == weights | {"README.md"}
    for name in weights:
        assert Path("again", name).read_bytes() == Path("out", name).read_bytes()
    assert sewa("apply", f"out/{REPORT}", "-o", "file.safetensors").code == 0
    assert Path("file.safetensors").read_bytes() == Path("one.safetensors").read_bytes()
    refused = sewa("apply", f"out/{REPORT}", "-o", "out", "--force")
    assert refused.code == 3
    assert "holds one of the inputs" in refused.error


@pytest.mark.usefixtures("run_dir")
def test_select_writes_a_folder_too_with_its_report_inside(sewa):
    for name in ("averaged", "averaged-2"):  # a second run takes the next free name
        ended = sewa("select", "--set", f"shard_size={SIZE}")
        assert ended.code == 0, ended.err
        report = json.loads(Path(name, REPORT).read_text())
        assert report["output"] == name
        assert report["recipe"]["shard_size"] == report["config"]["shard_size"] == SIZE
        assert inside(name) == {*FOLDER, REPORT}
    assert sewa("verify", "averaged-2").code == 0


@pytest.mark.parametrize("doing", ["weighted_mean", "sha256_of"])
@pytest.mark.parametrize("part", ["model-00002-of-00002.safetensors", INDEX])
def test_a_shard_or_index_that_changes_while_it_is_averaged_or_hashed_is_named(
    ckpts, sewa, monkeypatch, part, doing
):
    for name, method in (("one", "last"), ("two", "uniform")):
        arguments = ["--method", method, "-o", name, "--shard-size", SIZE]
        assert sewa("average", "ckpts", *arguments).code == 0

    real = getattr(recipe, doing)

    def meanwhile(*arguments):
        os.utime(Path("one", part))
        Path(ckpts[0].parent, "step-900.safetensors").touch()  # next to it is no matter
        return real(*arguments)

    monkeypatch.setattr(recipe, doing, meanwhile)
    arguments = ["average", "one", "two", "--weights", "0.5,0.5", "-o", "out"]
    ended = sewa(*arguments, "--shard-size", SIZE, "--report", f"out/{REPORT}")
    assert ended.code == 3, ended.err
    assert f"one/{part}: changed while it was being read; try again" in ended.error
    assert not Path("out").exists()
    assert not list(Path().glob(".sewa-*"))


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize("output", ["-", "out.safetensors", "out.pt"])
def test_one_file_cannot_be_split(sewa, output):
    ended = sewa("average", "ckpts", "-o", output, "--shard-size", "5GB")
    assert ended.code == 2
    assert ended.out == ""
    assert "--shard-size: " in ended.error
    assert not Path(output).exists()
