"""The text setting: AG News' csv, tokens of basic English, the paper's network, its commands."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.tiny import Sewa
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

FOLDER = Path(__file__).parents[2] / "sample_configs" / "text_classification"

AG_NEWS = (
    b'"3","Wall St. Bears (Reuters)","Reuters - Short-sellers, Wall Street\'s dwindling\\band of'
    b' ultra-cynics, are ""green"" again."\n'
    b'"4","Seti","Caf\xc3\xa9 signal; from: space?"\n'
    b'"1","","the the the"\n'
    b'"2","Empty",""\n'
    b'"1","",""\n'
)


def load_module(name: str) -> Any:
    """A module of the setting's folder, as its scripts see it."""
    sys.path.insert(0, str(FOLDER))
    try:
        if name == "texts":
            return importlib.import_module("texts")
        spec = importlib.util.spec_from_file_location(f"text_setting_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


texts = load_module("texts")
task = load_module("task")


def write_table(path: Path, rows: list[tuple[int, str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def opinions(seed: int, rows: int) -> list[tuple[int, str, str]]:
    """Reviews of two classes, told apart by a word or two among others."""
    draw = random.Random(seed)
    told = {1: ["bad", "awful", "dull"], 2: ["good", "fine", "lovely"]}
    made = []
    for _ in range(rows):
        label = draw.choice([1, 2])
        words = draw.choices(["a", "film", "of", "the", "sea"], k=draw.randint(2, 9))
        words.insert(draw.randrange(len(words)), draw.choice(told[label]))
        made.append((label, "", " ".join(words) + "."))
    return made


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    folder = tmp_path / "reviews"
    folder.mkdir()
    write_table(folder / "train.csv", opinions(0, 200))
    write_table(folder / "test.csv", opinions(1, 50))
    return folder


@pytest.fixture
def ag_news(tmp_path: Path) -> Path:
    folder = tmp_path / "ag_news_csv"
    folder.mkdir()
    (folder / "train.csv").write_bytes(AG_NEWS)
    (folder / "test.csv").write_bytes(b'"2","A title","the signal is green"\n')
    return folder


def basic_english(line: str) -> list[str]:
    """torchtext's `basic_english`, replacement by replacement as it is documented."""
    for pattern, replacement in [
        (r"\'", " '  "),
        (r"\"", ""),
        (r"\.", " . "),
        (r"<br \/>", " "),
        (r",", " , "),
        (r"\(", " ( "),
        (r"\)", " ) "),
        (r"\!", " ! "),
        (r"\?", " ? "),
        (r"\;", " "),
        (r"\:", " "),
        (r"\s+", " "),
    ]:
        line = re.sub(pattern, replacement, line.lower())
    return line.split()


@given(st.one_of(st.text(), st.text("aB'\".,()!?;:<br />\t\n\\-é")))
def test_the_tokens_are_those_of_basic_english(text: str) -> None:
    assert texts.tokenize(text) == basic_english(text)


def test_punctuation_is_split_off_and_case_is_lost() -> None:
    tokens = texts.tokenize('It\'s "Good", (really)!<br />End: yes;no')
    assert " ".join(tokens) == "it ' s good , ( really ) ! end yes no"


def test_ag_news_has_four_classes_and_its_line_breaks_are_spaces(ag_news: Path) -> None:
    rows = list(texts.read_rows(ag_news / "train.csv"))
    assert [label for label, _ in rows] == [2, 3, 0, 1, 0]
    assert rows[0][1] == (
        "Wall St. Bears (Reuters) Reuters - Short-sellers, Wall Street's dwindling band of "
        'ultra-cynics, are "green" again.'
    )
    assert rows[1][1] == "Seti Café signal; from: space?"
    model = task.build_model(data=str(ag_news), vocabulary=50, length=8, width=8, heldout=1)
    assert model.linear.out_features == 4


def test_ids_are_cut_padded_and_by_frequency_in_the_training_file(ag_news: Path) -> None:
    arrays = texts.load(str(ag_news), 5, 6)
    # three times, twice, twice; `reuters` is there twice as well, and sorts behind
    assert arrays["words"].tolist() == ["the", ",", "."]
    assert arrays["train_ids"][0].tolist() == [1, 1, 4, 1, 1, 1]  # wall st . bears ( reuters
    assert arrays["train_ids"][2].tolist() == [2, 2, 2, 0, 0, 0]
    assert arrays["test_ids"].tolist() == [[1, 1, 2, 1, 1, 1]]  # a title the signal is green
    assert arrays["train_classes"].tolist() == [2, 3, 0, 1, 0]


def test_a_text_without_a_token_is_unknown_not_all_padding(ag_news: Path) -> None:
    assert texts.load(str(ag_news), 50, 6)["train_ids"][4].tolist() == [texts.UNK, 0, 0, 0, 0, 0]
    model = task.build_model(data=str(ag_news), vocabulary=50, length=6, width=8, heldout=1)
    ids = torch.from_numpy(texts.load(str(ag_news), 50, 6)["train_ids"]).long()
    assert model.eval()(ids).isfinite().all()


@pytest.mark.parametrize(
    ("train", "fault"),
    [
        (b'"1","a"\n', "line 1: 2 columns, not class, title, description"),
        (b'"1","a","b"\n"2","a","b","c"\n', "line 2: 4 columns"),
        (b'"1","a","b"\n\n', "line 2: 0 columns"),
        (b'"0","a","b"\n', "line 1: the class must count from 1, found '0'"),
        (b'"class","title","description"\n', "the class must count from 1, found 'class'"),
        (b'"1","a","b"\n"2","cut off in the mid', "line 2: unexpected end of data"),
        (b'"1","a","b"c"\n', "line 1: "),
        (b'"1","a","\xff\xfe"\n', "is not UTF-8 text"),
        (b"", "has no rows"),
        (b'"1","a","b"\n', "test.csv has class 2, train.csv has 1 to 1 only"),
    ],
)
def test_a_spoilt_file_is_one_line_that_says_where(train: bytes, fault: str, ag_news: Path) -> None:
    (ag_news / "train.csv").write_bytes(train)
    with pytest.raises(ValueError, match=re.escape(fault)) as told:
        texts.load(str(ag_news), 50, 6)
    assert str(ag_news) in str(told.value)
    assert "\n" not in str(told.value)
    assert sorted(path.name for path in ag_news.iterdir()) == ["test.csv", "train.csv"]


def test_a_missing_file_says_make_data(ag_news: Path) -> None:
    (ag_news / "test.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.csv: no such file; `make data`"):
        texts.load(str(ag_news), 50, 6)
    with pytest.raises(FileNotFoundError, match=r"data.no-such-set.train\.csv: no such file"):
        texts.load("no-such-set", 50, 6)


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 8), (50, 0)])
def test_sizes_that_leave_nothing_are_refused(vocabulary: int, length: int, ag_news: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary: 3 or more, length: 1 or more"):
        texts.load(str(ag_news), vocabulary, length)


def load_anew(folder: Path, vocabulary: int = 50, length: int = 6) -> dict[str, Any]:
    texts.load.cache_clear()
    arrays: dict[str, Any] = texts.load(str(folder), vocabulary, length)
    return arrays


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(numpy.array_equal(one[k], two[k]) for k in one)


def test_what_was_tokenised_is_read_from_its_file_and_equal(
    ag_news: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_anew(ag_news)
    assert [path.name for path in ag_news.iterdir() if path.suffix != ".csv"] == ["tokens-50-6.npz"]
    monkeypatch.setattr(texts, "encode", None)
    assert same(load_anew(ag_news), first)


def test_a_changed_csv_or_other_sizes_are_tokenised_anew(ag_news: Path) -> None:
    load_anew(ag_news)
    assert load_anew(ag_news, length=3)["train_ids"].shape == (5, 3)
    assert len(load_anew(ag_news, vocabulary=4)["words"]) == 2
    file = ag_news / "train.csv"
    file.write_bytes(AG_NEWS.replace(b"the the the", b"and and and"))  # as long as it was
    os.utime(file, ns=(0, 0))
    assert "and" in load_anew(ag_news)["words"]


@pytest.mark.parametrize("spoil", ["cut", "noise", "empty"])
def test_a_spoilt_token_file_is_made_again(spoil: str, ag_news: Path) -> None:
    first = load_anew(ag_news)
    cache = ag_news / "tokens-50-6.npz"
    whole = cache.read_bytes()
    cache.write_bytes({"cut": whole[:-100], "noise": b"noise" * 99, "empty": b""}[spoil])
    assert same(load_anew(ag_news), first)
    assert cache.stat().st_size == len(whole)


def test_where_no_token_file_can_be_written_it_goes_on_without(ag_news: Path) -> None:
    (ag_news / "tokens-50-6.npz").mkdir()  # root may write anywhere, but not over a folder
    assert load_anew(ag_news)["train_ids"].shape == (5, 6)
    names = sorted(path.name for path in ag_news.iterdir())
    assert names == ["test.csv", "tokens-50-6.npz", "train.csv"]


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_the_network_is_the_papers(layers: int, reviews: Path) -> None:
    model = task.build_model(data=str(reviews), length=16, layers=layers, width=8, heldout=9)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(nn.Embedding) == 2
    assert kinds.count(nn.TransformerEncoderLayer) == layers
    assert [type(child) for child in model.children()][-1] is nn.Linear
    assert model.linear.out_features == 2


def test_padding_changes_nothing_and_places_matter(reviews: Path) -> None:
    model = task.build_model(data=str(reviews), length=12, width=8, heldout=9).eval()
    ids = torch.tensor([[2, 3, 4, 5, 6, 7] + [texts.PAD] * 6])
    with torch.no_grad():
        whole = model(ids)
        kept = model.places.weight.clone()
        model.places.weight[6:] = 99.0
        assert torch.equal(model(ids), whole)
        model.places.weight.copy_(kept)
        assert not torch.allclose(model(ids[:, [1, 0, *range(2, 12)]]), whole)


def test_eval_mode_computes_what_training_without_dropout_does(reviews: Path) -> None:
    model = task.build_model(data=str(reviews), length=12, width=8, dropout=0.0, heldout=9)
    ids = task.heldout_data(str(reviews), length=12, heldout=9)[0][0]
    trained = model.train()(ids).detach()
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), trained)


def rows_of(batches: list[Any]) -> torch.Tensor:
    return torch.cat([ids for ids, _ in batches])


def test_training_selection_and_held_out_rows_are_apart(tmp_path: Path) -> None:
    """Each text is one word of its own, so that its id is its row."""
    words = [f"w{row:03}" for row in range(150)]
    write_table(tmp_path / "train.csv", [(1 + n % 2, "", w) for n, w in enumerate(words)])
    write_table(tmp_path / "test.csv", [(1, "", "w007"), (2, "", "elsewhere")])
    sizes: dict[str, Any] = {"data": str(tmp_path), "vocabulary": 400, "length": 2}
    training = set(rows_of(task.training_data(**sizes))[:, 0].tolist())
    fresh = rows_of(task.selection_data(**sizes, selection=30))[:, 0].tolist()
    assert training == set(range(2, 122))
    assert fresh == list(range(122, 152))
    assert set(rows_of(task.selection_data(**sizes, selection=7))[:, 0].tolist()) < set(fresh)
    others = rows_of(task.selection_data(**sizes, selection=7, selection_skip=7))[:, 0].tolist()
    assert others == fresh[-14:-7]
    again = task.selection_data(**sizes, selection=120, selection_from="training")
    assert set(rows_of(again)[:, 0].tolist()) == training
    assert rows_of(task.heldout_data(**sizes, heldout=2))[:, 0].tolist() == [9, texts.UNK]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"selection": 41}, "selection: from 1 to 40 rows, found 41"),
        ({"selection": 0}, "selection: from 1 to 40 rows, found 0"),
        ({"selection": 161, "selection_from": "training"}, "from 1 to 160 rows, found 161"),
        ({"selection": 35, "selection_skip": 6}, "selection: from 1 to 34 rows, found 35"),
        ({"selection_skip": -1}, "selection_skip: 0 rows or more, found -1"),
        ({"selection_from": "test"}, "selection_from: fresh or training, found 'test'"),
    ],
)
def test_rows_that_are_not_there_are_refused(
    settings: dict[str, Any], fault: str, reviews: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        task.selection_data(data=str(reviews), **settings)
    with pytest.raises(ValueError, match="heldout: from 1 to 50 rows, found 51"):
        task.heldout_data(data=str(reviews), heldout=51)


def train(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", *map(str, options)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.breadth  # test_benchmarks_quality.py trains and compares in this setting, too
def test_it_trains_selects_and_compares_as_its_readme_says(
    tmp_path: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    run = tmp_path / "run"
    shutil.copytree(FOLDER, run, ignore=shutil.ignore_patterns("ckpts*", "averaged*", "*.png"))
    monkeypatch.chdir(run)
    shape = ["--data", reviews, "--vocabulary", 50, "--length", 12, "--width", 8, "--batch", 16]
    small = [*shape, "--checkpoints", 12, "--every", 5, "--warmup", 60, "--lr", 0.01]
    trained = train(run, *small)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.splitlines()[-1] == f"12 checkpoints in {run / 'ckpts'}"
    files = {path.name for path in (run / "ckpts").iterdir()}
    assert files == {f"step-{step}.safetensors" for step in range(65, 121, 5)}

    again = train(run, *small, "--out", "again")
    assert again.returncode == 0, again.stderr
    one, two = (load_file(run / out / "step-120.safetensors") for out in ("ckpts", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())
    refused = train(run, *small)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "has checkpoints of another run" in refused.stderr

    args = {"data": reviews, "vocabulary": 50, "length": 12, "width": 8}
    args |= {"selection": 40, "heldout": 50}
    sets = [part for key, value in args.items() for part in ("--set", f"args.{key}={value}")]
    for solver in ("gumbel", "linear"):
        ended = sewa("select", "--K", 4, "--solver", solver, *sets, "--json", "--force")
        assert ended.code == 0, ended.err
        report = json.loads(ended.out)
        assert report["k"] == 12
        assert report["average"]["metrics"]["accuracy"] > 0.8
    ended = sewa(
        *("compare", "--methods", "lawa,swa,ema,random,sewa", "--K", 4, "--format", "json", *sets)
    )
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)["rows"]
    assert {row["method"] for row in rows} == {"lawa", "swa", "ema", "random", "sewa"}
    assert all(row["metrics"]["accuracy"] > 0.5 for row in rows)


def test_without_data_every_command_says_make_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    run = tmp_path / "run"
    shutil.copytree(FOLDER, run, ignore=shutil.ignore_patterns("ckpts*", "averaged*", "*.png"))
    trained = train(run, "--data", "missing/")
    assert trained.returncode == 1
    assert trained.stderr.count("\n") == 1
    assert "`make data`" in trained.stderr
    (run / "ckpts").mkdir()
    for step in (1, 2):
        weights = {"linear.weight": torch.zeros(2, 2)}
        save_file(weights, run / "ckpts" / f"step-{step}.safetensors")
    monkeypatch.chdir(run)
    ended = sewa("select", "--set", "args.data=./missing", "--K", 1)
    assert ended.code == 4
    assert "no such file; `make data` at the root fetches IMDB" in ended.error
