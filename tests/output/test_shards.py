"""Outputs larger than --shard-size: a set in the Hugging Face style, whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import Sewa, train_tiny
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sewa_cli.config import load_config
from sewa_cli.dtypes import Array
from sewa_cli.errors import ConfigError
from sewa_cli.output import average as recipe
from sewa_cli.output.journal import Journal, Plan
from sewa_cli.output.mean import weighted_mean
from sewa_cli.output.safetensors import belongs_to_set, split_into_shards

SIZE = 450  # bytes; the tiny network has 64 + 384 and 8 + 128
REPORT = ["--report", "out.report.json"]


@pytest.fixture
def ckpts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    return [path.relative_to(tmp_path) for path in train_tiny(tmp_path / "ckpts", k=4)]


def load_set(index: str) -> dict[str, Tensor]:
    """As transformers loads it: by the index alone."""
    weight_map = json.loads(Path(index).read_text())["weight_map"]
    found = {}
    for name, file in weight_map.items():
        with safe_open(Path(index).parent / file, framework="pt") as shard:
            found[name] = shard.get_tensor(name)
    return found


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


# ---- the split ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [  # with a limit of 10, as huggingface_hub 1.x splits them
        ([6, 10, 30, 2, 2], [[6], [30], [10], [2, 2]]),
        ([6, 6, 2, 6, 2, 2], [[6], [6, 2], [6, 2, 2]]),
        ([3, 30, 3, 3], [[30], [3, 3, 3]]),
        ([4, 11], [[11], [4]]),
        ([5, 5], [[5, 5]]),
        ([11], [[11]]),
        ([0, 0], [[0, 0]]),
    ],
    ids=str,
)
def test_the_split_is_hugging_faces(sizes: list[int], expected: list[list[int]]) -> None:
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    found = split_into_shards(named, 10)
    assert [[named[name] for name in names] for names in found] == expected


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_every_tensor_is_in_one_shard_and_only_a_lone_one_is_over_the_limit(
    sizes: list[int], limit: int
) -> None:
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    shards = split_into_shards(named, limit)
    assert sorted(name for names in shards for name in names) == sorted(named)
    for names in shards:
        assert names
        assert len(names) == 1 or sum(named[name] for name in names) <= limit


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("out-00001-of-00003.safetensors", True),
        ("out.safetensors.index.json", True),
        ("out.safetensors", False),
        ("out-2.safetensors", False),
        ("out-2-00001-of-00003.safetensors", False),
        ("elsewhere/out-00001-of-00003.safetensors", False),
    ],
)
def test_what_belongs_to_a_set(tmp_path: Path, name: str, belongs: bool) -> None:
    for output in ("out", "out.safetensors"):
        assert belongs_to_set(tmp_path / name, tmp_path / output) is belongs


# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 500 * 10**6), ("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5 kb", 1500), ("77", 77)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert load_config(None, {"shard_size": text}).shard_size == size


@pytest.mark.parametrize("text", ["5 apples", "-5GB", "GB", "1.2.3GB", "", "0", "5G B", "nan"])
def test_other_sizes_are_faults_of_the_config(text: str) -> None:
    with pytest.raises(ConfigError, match="--shard-size: must be") as caught:
        load_config(None, {"shard_size": text})
    assert text in str(caught.value)


# ---- the set -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize("output", ["out.safetensors", "out"])
def test_a_large_output_becomes_a_set_with_an_index(sewa: Sewa, output: str) -> None:
    assert sewa("average", "ckpts", "-o", "one.safetensors").code == 0
    ended = sewa("average", "ckpts", "-o", output, "--shard-size", SIZE, *REPORT)
    assert ended.code == 0, ended.err
    assert "wrote out.safetensors.index.json" in ended.err
    shards = ["out-00001-of-00002.safetensors", "out-00002-of-00002.safetensors"]
    assert files("out*") == [*shards, "out.report.json", "out.safetensors.index.json"]
    index = json.loads(Path("out.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 584}
    assert set(index["weight_map"].values()) == set(shards)
    whole, found = load_file("one.safetensors"), load_set("out.safetensors.index.json")
    assert whole.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["sewa_method"] == "uniform"


@pytest.mark.usefixtures("ckpts")
def test_apply_rebuilds_the_same_set(sewa: Sewa) -> None:
    assert (
        sewa("average", "ckpts", "-o", "out.safetensors", "--shard-size", SIZE, *REPORT).code == 0
    )
    ended = sewa("apply", "out.report.json", "-o", "again.safetensors")
    assert ended.code == 0, ended.err
    assert "wrote again.safetensors.index.json" in ended.err
    for path in files("out-*", "out.safetensors*"):
        again = Path(path.replace("out", "again", 1)).read_bytes()
        assert again == Path(path).read_bytes().replace(b'"out-', b'"again-')
    assert len(files("again*")) == 3
    refused = sewa("apply", "out.report.json", "-o", "again.safetensors")
    assert refused.code == 3
    assert "again-00001-of-00002.safetensors: exists" in refused.error
    piped = sewa("apply", "out.report.json", "-o", "-")
    assert piped.code == 2
    assert "cannot go to standard output" in piped.error


@pytest.mark.usefixtures("ckpts")
def test_what_fits_is_still_one_file(sewa: Sewa) -> None:
    assert sewa("average", "ckpts", "-o", "one.safetensors").code == 0
    ended = sewa("average", "ckpts", "-o", "out.safetensors", "--shard-size", "584", *REPORT)
    assert ended.code == 0, ended.err
    assert files("out*") == ["out.report.json", "out.safetensors"]
    assert Path("out.safetensors").read_bytes() == Path("one.safetensors").read_bytes()
    assert sewa("apply", "out.report.json", "-o", "-").code == 0


@pytest.mark.usefixtures("run_dir")
def test_select_writes_a_set_too_and_its_report_names_the_index(sewa: Sewa) -> None:
    for n in ("", "-2"):  # a second run takes the next free name
        ended = sewa("select", "--set", f"shard_size={SIZE}")
        assert ended.code == 0, ended.err
        report = json.loads(Path(f"averaged{n}.report.json").read_text())
        assert report["output"] == f"averaged{n}.safetensors.index.json"
        assert report["recipe"]["shard_size"] == report["config"]["shard_size"] == SIZE
        assert f"wrote averaged{n}.safetensors.index.json" in ended.err
        assert not Path(f"averaged{n}.safetensors").exists()
    assert sewa("apply", "averaged.report.json", "-o", "again").code == 0
    one, two = load_set("averaged.safetensors.index.json"), load_set("again.safetensors.index.json")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("part", ["-00002-of-00002.safetensors", ".safetensors.index.json"])
def test_a_shard_or_index_that_changes_while_it_is_read_is_named(
    ckpts: list[Path], sewa: Sewa, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    for name, method in (("one", "last"), ("two", "uniform")):
        arguments = ["--method", method, "-o", f"{name}.safetensors", "--shard-size", SIZE]
        assert sewa("average", "ckpts", *arguments).code == 0
    sources = ["one.safetensors.index.json", "two.safetensors.index.json"]
    before = files("*", ".*")

    def meanwhile(*arguments: Any) -> Array:
        os.utime(f"one{part}")
        Path(ckpts[0].parent, "step-900.safetensors").touch()  # beside it is no matter
        return weighted_mean(*arguments)

    monkeypatch.setattr(recipe, "weighted_mean", meanwhile)
    arguments = ["average", *sources, "--weights", "0.5,0.5", "-o", "out.safetensors"]
    ended = sewa(*arguments, "--shard-size", SIZE)
    assert ended.code == 3, ended.err
    assert f"one{part}: changed while it was being read; try again" in ended.error
    assert files("*", ".*") == before


# ---- manners -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("ckpts")
def test_standard_output_takes_no_set(sewa: Sewa) -> None:
    ended = sewa("average", "ckpts", "-o", "-", "--shard-size", "5GB")
    assert ended.code == 2
    assert ended.out == ""
    assert "--shard-size: a set of files cannot go to standard output" in ended.error


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize(
    "taken", ["out-00002-of-00002.safetensors", "out.safetensors.index.json", "out.safetensors"]
)
def test_nothing_of_a_set_is_overwritten_without_force(sewa: Sewa, taken: str) -> None:
    Path(taken).write_text("mine")
    arguments = ["average", "ckpts", "-o", "out.safetensors", "--shard-size", SIZE]
    ended = sewa(*arguments)
    assert ended.code == 3
    assert f"{taken}: exists; use --force" in ended.error
    assert files("*out*") == [taken]
    assert Path(taken).read_text() == "mine"
    assert sewa(*arguments, "--force").code == 0
    # an older single file would be loaded instead of the set
    assert len(files("out-*", "out.safetensors*")) == 3
    assert len(load_set("out.safetensors.index.json")) == 4


def test_an_input_is_not_overwritten_by_a_shard_of_its_name(ckpts: list[Path], sewa: Sewa) -> None:
    shard = Path("out-00001-of-00002.safetensors")
    save_file(load_file(ckpts[0]), shard)
    before = shard.read_bytes()
    arguments = ["average", shard, ckpts[1], "-o", "out", "--shard-size", SIZE, "--force"]
    ended = sewa(*arguments)
    assert ended.code == 3
    assert "is one of the inputs" in ended.error
    assert shard.read_bytes() == before


@pytest.mark.usefixtures("run_dir")
def test_the_report_is_not_a_file_of_the_set(sewa: Sewa) -> None:
    ended = sewa(
        "select", "-o", "out", "--shard-size", SIZE, "--report", "out.safetensors.index.json", "-f"
    )
    assert ended.code == 2
    assert "--report names a file of the sharded output" in ended.error


@pytest.mark.usefixtures("ckpts")
@pytest.mark.parametrize("force", [False, True])
def test_a_set_appears_whole_or_not_at_all(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """The last name cannot be given: what stood there before stands there again."""
    arguments = ["average", "ckpts", "-o", "out", "--shard-size", SIZE, *REPORT]
    if force:
        assert sewa(*arguments, "--method", "last").code == 0
    before = {path: Path(path).read_bytes() for path in files("*out*", ".*out*")}
    real = Journal.place

    def broken(journal: Journal, name: str, plan: Plan) -> None:
        if name == "out.report.json":
            raise OSError(errno.EEXIST if not force else errno.EIO, "broken")
        real(journal, name, plan)

    monkeypatch.setattr(Journal, "place", broken)
    ended = sewa(*arguments, *(["--force"] if force else []))
    assert ended.code == 3
    assert {path: Path(path).read_bytes() for path in files("*out*", ".*out*")} == before


@pytest.mark.usefixtures("run_dir")
def test_the_best_of_a_comparison_can_be_a_set(sewa: Sewa) -> None:
    arguments = ["--methods", "last,uniform", "--set", f"shard_size={SIZE}"]
    ended = sewa("compare", *arguments, "--output-best", "best.safetensors")
    assert ended.code == 0, ended.err
    assert "wrote best.safetensors.index.json" in ended.err
    assert len(files("best-*")) == 2
    assert sewa("apply", "best.report.json", "-o", "again.safetensors").code == 0
    for path in files("best-*"):
        again = Path(path.replace("best", "again", 1))
        assert again.read_bytes() == Path(path).read_bytes()
