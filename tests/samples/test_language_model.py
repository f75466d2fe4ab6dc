"""The language model: documents apart, and a small run as its README says."""

import csv
import importlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "sample_configs" / "language_model"
SMALL = (
    "--steps 26 --decay 4 --every 1 --checkpoints 22 --warmup 3 --words 300 --width 16 --layers 1 "
    "--selection 12 --heldout 10 --batch 2 --reviews texts --further"
)


def write_reviews(folder):
    """Write reviews of two hundred words, in which some words follow others."""
    folder.mkdir()
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


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, sewa):
    assert "$ python train.py\n$ sewa select\n" in (FOLDER / "README.md").read_text()
    run = tmp_path / "run"
    shutil.copytree(FOLDER, run, ignore=shutil.ignore_patterns("ckpts", "data", "__pycache__"))
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(run)
    write_reviews(run / "texts")
    parts = importlib.import_module("reviews").documents(run / "texts")
    assert [len(some) for some in parts.values()] == [48, 12, 10]
    assert len({text for some in parts.values() for text in some}) == 70  # no document in two
    subprocess.run([sys.executable, "train.py", *SMALL.split()], check=True, capture_output=True)
    # the only thing that its yaml has of the longer run
    Path("ckpts/checkpoint-30").rename("ckpts/checkpoint-1024")
    few = ["--set", "args.max_length=8", "--set", "args.limit=12"]  # tokens and rows, to be quick
    ended = sewa("select", "--last", 6, "--json", *few)
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["k"] == 6
    assert report["average"]["heldout_loss"] < 5.7  # what chance has with 300 words
