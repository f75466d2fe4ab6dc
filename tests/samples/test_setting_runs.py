"""The paper's three settings in sample_configs/: parts that are apart, and a small run of each."""

import csv
import importlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sewa_cli.errors import TaskError

h5py = pytest.importorskip("h5py")

SAMPLES = Path(__file__).parents[2] / "sample_configs"
MODULES = ("task", "episodes", "experts", "cifar", "texts")


@pytest.fixture(autouse=True)
def _fresh_modules():
    """Each setting has a task.py of its own."""
    for name in MODULES:
        sys.modules.pop(name, None)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def load(monkeypatch):
    """load("text_classification") → its task.py."""

    def load(folder, module="task"):
        monkeypatch.syspath_prepend(SAMPLES / folder)
        return importlib.import_module(module)

    return load


def write_episodes(path, count, length):
    """Episodes in D4RL's format, whose actions follow from the observations."""
    draw = np.random.default_rng(0)
    observations = draw.standard_normal((count * length, 11)).astype(np.float32)
    ends = np.arange(1, len(observations) + 1) % length == 0
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = observations, np.tanh(observations[:, :3])
        file["rewards"] = np.ones(len(ends), dtype=np.float32)
        file["terminals"], file["timeouts"] = ends, np.zeros_like(ends)
    return path


def write_images(folder, each):
    """CIFAR-10's binary files with `each` images, no two alike."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = draw.integers(0, 256, (each, 1 + 3072), dtype=np.uint8)
        rows[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def write_texts(folder):
    """Reviews of two classes, which one word among others shows."""
    folder.mkdir()
    draw = random.Random(0)
    telling = {1: ["bad", "awful", "dull"], 2: ["good", "fine", "lovely"]}
    for name, rows in (("train", 200), ("test", 50)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, quoting=csv.QUOTE_ALL)
            for number in range(rows):
                label = draw.choice([1, 2])
                words = [*draw.choices(["a", "film", "of", "the"], k=5), f"n{name}{number}"]
                words.insert(draw.randrange(6), draw.choice(telling[label]))
                table.writerow([label, "", " ".join(words) + "."])
    return folder


def write_data(setting, folder):
    if setting == "behavior_cloning":
        return write_episodes(folder / "hopper-tiny.hdf5", 20, 40)
    if setting == "image_classification":
        return write_images(folder / "cifar", 20)
    return write_texts(folder / "texts")


def ids(batches):
    return {row.numpy().tobytes() for inputs, _ in batches for row in inputs}


@pytest.mark.parametrize(
    ("setting", "sizes"),
    [
        ("behavior_cloning", {}),
        ("image_classification", {"statistics": 80}),
        ("text_classification", {"vocabulary": 400, "length": 12}),
    ],
)
def test_training_selection_and_held_out_examples_are_apart(load, tmp_path, setting, sizes):
    task, data = load(setting), str(write_data(setting, tmp_path))
    training = ids(task.training_data(data, **sizes))
    sizes.pop("statistics", None)
    fresh = ids(task.selection_data(data, selection=8, **sizes))
    heldout = ids(task.heldout_data(data, heldout=8, **sizes))
    assert len(fresh) == len(heldout) == 8
    assert not training & fresh
    assert not (training | fresh) & heldout


class RunsCode:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_of_images_never_runs_code(load, tmp_path):
    cifar = load("image_classification", "cifar")
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name in names:
        (tmp_path / name).write_bytes(pickle.dumps(RunsCode(tmp_path / "ran"), protocol=2))
    with pytest.raises(TaskError, match=r"it asks for posix\.system"):
        cifar.load(tmp_path, "training")
    assert not (tmp_path / "ran").exists()


# options of train.py, settings of the commands, the metric
RUNS = {
    "behavior_cloning": (
        "--before 30 --checkpoints 12 --every 5 --width 16",
        "width=16 selection=60 episodes=2",
        "return",
    ),
    "image_classification": (
        "--checkpoints 12 --every 1 --warmup 3 --blocks 1 --width 4 --batch 8",
        "selection=10 heldout=10 statistics=20 blocks=1 width=4",
        "accuracy",
    ),
    "text_classification": (
        "--vocabulary 50 --length 12 --width 8 --batch 16 --checkpoints 12 --every 5 --warmup 60",
        "vocabulary=50 length=12 width=8 selection=40 heldout=50",
        "accuracy",
    ),
}


@pytest.mark.parametrize("setting", RUNS)
def test_a_setting_trains_selects_and_compares_as_its_readme_says(
    setting, tmp_path, monkeypatch, sewa
):
    few, settings, metric = RUNS[setting]
    made = shutil.ignore_patterns("ckpts*", "averaged*", "__pycache__")
    shutil.copytree(SAMPLES / setting, tmp_path / "run", ignore=made)
    monkeypatch.chdir(tmp_path / "run")
    data = write_data(setting, tmp_path)

    def train(*options):
        command = [sys.executable, "train.py", "--data", str(data), *few.split(), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    first = train()
    assert first.returncode == 0, first.stderr
    files = {path.name: path.read_bytes() for path in Path("ckpts").iterdir()}
    assert len(files) == 12
    again = train("--seed", "1")
    assert again.returncode == 1
    assert "checkpoints of an" in again.stderr  # other, earlier run
    assert {path.name: path.read_bytes() for path in Path("ckpts").iterdir()} == files

    given = [f"args.{pair}" for pair in (f"data={data}", *settings.split())]
    sets = [word for pair in (*given, "gumbel.iterations=8") for word in ("--set", pair)]
    ended = sewa("select", "--K", 4, *sets, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert (report["k"], report["K"]) == (12, 4)
    assert report["average"]["metrics"][metric] >= 0
    methods = ("lawa", "swa", "ema", "random", "sewa")
    ended = sewa("compare", "--methods", ",".join(methods), "--K", 4, "--format", "json", *sets)
    assert ended.code == 0, ended.err
    assert {row["method"] for row in json.loads(ended.out)["rows"]} == {*methods}


@pytest.mark.parametrize("setting", RUNS)
def test_without_data_training_says_make_data(setting, tmp_path):
    command = [sys.executable, SAMPLES / setting / "train.py", "--data", "./missing"]
    ended = subprocess.run(
        [*command, "--out", tmp_path / "ckpts"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "`make data`" in ended.stderr
