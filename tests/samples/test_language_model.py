"""The language model: documents apart, a run that decays, and what averages do there."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import random
import shutil
import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest
from helpers.tiny import Sewa

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "sample_configs" / "language_model"
STEPS, DECAY, CHECKPOINTS = 26, 4, 22
FEW = "--set args.max_length=8 --set args.limit={}"  # tokens and rows, to be quick


def load_module(folder: Path, name: str) -> Any:
    """A script, as it is when it is run in its folder."""
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"language_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look for it
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))


train = load_module(FOLDER, "train")
reviews = sys.modules["reviews"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of two hundred words, in which some words follow others."""
    folder = tmp_path_factory.mktemp("imdb_csv")
    draw = random.Random(0)
    words = ["a", "film", "of", "the", "sea,", "which", "I've", "seen;", "naïve", "“long”", "bad!"]
    for name, rows in (("train", 60), ("test", 10)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, quoting=csv.QUOTE_ALL)
            for _ in range(rows):
                at, text = draw.randrange(len(words)), []
                for _ in range(200):
                    at = (at + draw.choice((1, 1, 1, 5))) % len(words)
                    text.append(words[at])
                table.writerow([draw.randint(1, 2), "", " ".join(text)])
    return folder


def options(texts: Path, home: Path, *more: object) -> Any:
    sizes = {"steps": STEPS, "decay": DECAY, "every": 1, "checkpoints": CHECKPOINTS, "warmup": 3}
    sizes |= {"words": 300, "width": 16, "layers": 1, "selection": 12, "heldout": 10, "batch": 2}
    places = ["--reviews", texts, "--data", home / "data", "--out", home / "ckpts"]
    given = [
        *(part for key, value in sizes.items() for part in (f"--{key}", value)),
        *places,
        *more,
    ]
    return train.arguments([str(part) for part in given])


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    train.main(options(texts, home, "--further"))
    return home


def test_no_document_is_in_two_parts(texts: Path) -> None:
    parts = reviews.documents(texts)
    assert {part: len(some) for part, some in parts.items()} == {
        "training": 48,
        "selection": 12,
        "heldout": 10,
    }
    assert len({text for some in parts.values() for text in some}) == 70


def test_the_commands_of_the_readme_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sewa: Sewa
) -> None:
    assert "$ python train.py\n$ sewa select\n" in (FOLDER / "README.md").read_text()
    shutil.copy(FOLDER / "sewa.yaml", tmp_path)
    shutil.copytree(trained / "data", tmp_path / "data")
    shutil.copytree(trained / "ckpts", tmp_path / "ckpts")
    # the only thing that its yaml has of the longer run
    (tmp_path / "ckpts" / "checkpoint-30").rename(tmp_path / "ckpts" / "checkpoint-1024")
    monkeypatch.chdir(tmp_path)
    ended = sewa("select", "--last", 6, "--json", *split(FEW.format(12)))
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["k"] == 6
    assert report["average"]["heldout_loss"] < 5.7  # what chance has with 300 words
