"""The cloning setting: files of D4RL and Minari, the paper's network, returns, a whole tiny run."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import Sewa
from safetensors.torch import load_file

from sewa_cli.errors import TaskError
from sewa_cli.task import load_task

h5py = pytest.importorskip("h5py")

FOLDER = Path(__file__).parents[2] / "sample_configs" / "behavior_cloning"
NAMES = ("episodes", "task", "experts")

Episode = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def _fresh_modules() -> Iterator[None]:
    """Other settings have a task.py too, and a copy of this one has an episodes.py."""
    for name in NAMES:
        sys.modules.pop(name, None)
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("episodes")


@pytest.fixture
def task(recorded: ModuleType) -> ModuleType:
    assert recorded.__file__ == str(FOLDER / "episodes.py")
    return importlib.import_module("task")


# files in both formats, of the same episodes


def make_episodes(lengths: list[int], observations: int = 11, actions: int = 3) -> list[Episode]:
    """No two rows are alike."""
    random = np.random.default_rng(0)
    return [
        (
            random.standard_normal((length, observations)).astype(np.float32),
            random.uniform(-1, 1, (length, actions)).astype(np.float32),
        )
        for length in lengths
    ]


def write_d4rl(path: Path, episodes: list[Episode], **columns: Any) -> Path:
    """As D4RL does it; every second episode ends with a timeout. A column of None is left out."""
    ends = np.cumsum([len(actions) for _, actions in episodes]) - 1
    terminals, timeouts = (np.zeros(ends[-1] + 1, dtype=bool) for _ in range(2))
    terminals[ends[::2]], timeouts[ends[1::2]] = True, True
    table = {
        "observations": np.concatenate([observations for observations, _ in episodes]),
        "actions": np.concatenate([actions for _, actions in episodes]),
        "rewards": np.ones(len(terminals), dtype=np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }
    with h5py.File(path, "w") as file:
        for name, values in (table | columns).items():
            if values is not None:
                file.create_dataset(name, data=values, compression="gzip")
        file["metadata/algorithm"] = "SAC"
    return path


def write_minari(folder: Path, episodes: list[Episode], **columns: Any) -> Path:
    """As Minari 0.5 does it: a group for each episode, with the state after the last action."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w", track_order=True) as file:
        for number, (observations, actions) in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"], group.attrs["total_steps"] = number, len(actions)
            flags = np.zeros(len(actions), dtype=bool)
            table = {
                "observations": np.vstack([observations, observations[-1:] + 1]),
                "actions": actions,
                "rewards": np.ones(len(actions)),
                "terminations": flags,
                "truncations": flags,
            }
            for name, values in (table | columns).items():
                if isinstance(values, dict):
                    for key, part in values.items():
                        group[f"{name}/{key}"] = part
                elif values is not None:
                    shape = (None, *values.shape[1:])
                    group.create_dataset(name, data=values, chunks=True, maxshape=shape)
            group.create_group("infos")
    return folder


@pytest.mark.parametrize("write", [write_d4rl, write_minari])
def test_both_formats_give_the_episodes_that_were_written(
    recorded: ModuleType, tmp_path: Path, write: Callable[[Path, list[Episode]], Path]
) -> None:
    written = make_episodes([3, 1, 5, 2, 4, 6, 1, 1, 7, 2, 3, 9])  # more than ten: 10 is after 2
    found = recorded.read(write(tmp_path / "hopper", written))
    assert len(found) == len(written)
    for mine, theirs in zip(found, written, strict=True):
        for here, there in zip(mine, theirs, strict=True):
            assert here.dtype == np.float32
            np.testing.assert_array_equal(here, there)


def test_an_episode_that_the_recording_cut_short_is_kept(
    recorded: ModuleType, tmp_path: Path
) -> None:
    nothing = np.zeros(9, dtype=bool)
    ends = nothing.copy()
    ends[3] = True
    path = write_d4rl(tmp_path / "x.hdf5", make_episodes([9]), terminals=ends, timeouts=nothing)
    assert [len(actions) for _, actions in recorded.read(path)] == [4, 5]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"timeouts": None}, "timeouts: is missing; found actions, metadata, obs"),
        ({"actions": np.zeros((4, 3))}, r"differ in length: \[5, 4, 5, 5\]"),
        ({"actions": np.full((5, 3), 1.5)}, r"must be within \[-1, 1\], found 1.5"),
        ({"observations": np.full((5, 2), np.nan)}, "NaN"),
        ({"observations": np.zeros(5)}, r"must be 2-dimensional numbers, found float64 \[5\]"),
        ({"observations": np.full((5, 2), b"no")}, "must be 2-dimensional numbers, found |S2"),
    ],
)
def test_a_d4rl_file_with_wrong_columns_is_told_in_one_line(
    recorded: ModuleType, tmp_path: Path, columns: dict[str, Any], told: str
) -> None:
    path = write_d4rl(tmp_path / "x.hdf5", make_episodes([2, 3]), **columns)
    with pytest.raises(TaskError, match=told) as caught:
        recorded.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"observations": None}, "episode_0 observations: is missing"),
        ({"observations": {"goal": np.zeros(4)}}, "episode_0 observations: is a group"),
        ({"observations": np.zeros((3, 11))}, "one observation more than actions, found 3 obs"),
        ({"actions": np.full((3, 3), 2.0)}, r"episode_0 actions: must be within \[-1, 1\]"),
        ({"actions": np.zeros(3, dtype=int)}, "episode_0 actions: must be 2-dimensional"),
    ],
)
def test_a_minari_folder_with_wrong_columns_is_told_in_one_line(
    recorded: ModuleType, tmp_path: Path, columns: dict[str, Any], told: str
) -> None:
    path = write_minari(tmp_path / "hopper", make_episodes([3, 3]), **columns)
    with pytest.raises(TaskError, match=told) as caught:
        recorded.read(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_are_told_in_one_line(recorded: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere: no such data; `make data`"):
        recorded.find("nowhere")
    with pytest.raises(TaskError, match=r"has no data/main_data\.hdf5"):
        recorded.read(tmp_path)
    text = tmp_path / "text.hdf5"
    text.write_text("observations, actions")
    whole = write_d4rl(tmp_path / "whole.hdf5", make_episodes([400]))
    cut = tmp_path / "cut.hdf5"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    empty = tmp_path / "empty" / "data" / "main_data.hdf5"
    empty.parent.mkdir(parents=True)
    h5py.File(empty, "w").close()
    for path in (text, cut, empty.parents[1]):
        with pytest.raises(TaskError) as caught:
            recorded.read(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_a_damaged_chunk_is_told_in_one_line(recorded: ModuleType, tmp_path: Path) -> None:
    path = write_d4rl(tmp_path / "x.hdf5", make_episodes([400]))
    with h5py.File(path) as file:
        place = file["observations"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[place.byte_offset : place.byte_offset + 64] = b"\xff" * 64
    path.write_bytes(content)
    with pytest.raises(TaskError) as caught:
        recorded.read(path)
    assert "\n" not in str(caught.value)


# the split


def identify(table: Any) -> set[bytes]:
    return {bytes(row) for row in np.asarray(table[0])}


def test_episodes_are_split_whole_and_every_row_is_somewhere(recorded: ModuleType) -> None:
    episodes = make_episodes([40 + n for n in range(30)])
    tables = recorded.split(episodes)
    parts = {name: identify(table) for name, table in tables.items()}
    everything = sum(len(actions) for _, actions in episodes)
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == everything
    for observations, _ in episodes:
        rows = {bytes(row) for row in observations}
        assert sum(not rows.isdisjoint(part) for part in parts.values()) == 1
    for name in ("selection", "heldout"):
        assert 0.1 <= len(parts[name]) / everything < 0.15
    # an observation keeps its action
    pairs = {bytes(o): bytes(a) for pair in episodes for o, a in zip(*pair, strict=True)}
    for table in tables.values():
        assert all(pairs[bytes(o)] == bytes(a) for o, a in zip(*table, strict=True))


def test_two_episodes_are_too_few(recorded: ModuleType) -> None:
    with pytest.raises(TaskError, match="2 episodes are too few"):
        recorded.split(make_episodes([5, 5]))


def test_rows_to_select_with_are_fresh_unless_asked_for(task: ModuleType, tmp_path: Path) -> None:
    data = str(write_d4rl(tmp_path / "hopper.hdf5", make_episodes([500] * 130)))

    def ids(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> set[bytes]:
        return {bytes(row.numpy()) for observations, _ in batches for row in observations}

    training, heldout = ids(task.training_data(data)), ids(task.heldout_data(data))
    assert len(heldout) == 4000
    for count in (200, 5000):
        fresh = ids(task.selection_data(data, count))
        assert len(fresh) == count
        assert fresh.isdisjoint(training | heldout)
        assert len(ids(task.selection_data(data, count, "training")) & training) == count
    others = ids(task.selection_data(data, 200, selection_skip=200))
    assert others | ids(task.selection_data(data, 200)) == ids(task.selection_data(data, 400))
    with pytest.raises(TaskError, match=r"args\.selection: must be 1 to 6300 rows"):
        task.selection_data(data, 6301, selection_skip=200)
    with pytest.raises(TaskError, match=r"args\.selection_skip: must be 0 or more rows, found -1"):
        task.selection_data(data, 200, selection_skip=-1)
    with pytest.raises(TaskError, match=r"args\.selection: must be 1 to 6500 rows"):
        task.selection_data(data, 6501)
    with pytest.raises(TaskError, match=r"args\.selection: must be 1 to"):
        task.selection_data(data, 0)
    with pytest.raises(TaskError, match=r"args\.selection_from: must be fresh or training"):
        task.selection_data(data, 200, "heldout")
    with pytest.raises(TaskError, match=r"args\.heldout: must be 1 or more"):
        task.heldout_data(data, 0)


# the network, and how it does


@pytest.fixture
def hopper(tmp_path: Path) -> str:
    return str(write_d4rl(tmp_path / "hopper-made-up.hdf5", make_episodes([30] * 20)))


def test_the_network_has_the_papers_shape(task: ModuleType, hopper: str) -> None:
    layers = [type(layer).__name__ for layer in task.build_model(hopper).layers]
    assert layers == ["Linear", *["ReLU", "Dropout", "Linear"] * 4, "Tanh"]


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_is_that_of_the_layers(task: ModuleType, hopper: str, training: bool) -> None:
    model = task.build_model(hopper, dropout=0.5).train(training)
    seen = torch.randn(5, 11)
    found = []
    for run in (model, lambda x: model.layers((x - model.mean) / model.std)):
        torch.manual_seed(0)
        found.append(run(seen))
    assert torch.equal(*found)


def test_observations_are_normalised_by_the_training_rows(task: ModuleType, hopper: str) -> None:
    model = task.build_model(hopper, width=8)
    seen = torch.cat([observations for observations, _ in task.training_data(hopper)])
    normal = (seen - model.mean) / model.std
    torch.testing.assert_close(normal.mean(0), torch.zeros(11), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(11), atol=2e-3, rtol=0)
    assert {"mean", "std"} <= set(model.state_dict())  # a checkpoint is a whole policy


def test_episodes_side_by_side_return_what_they_return_one_by_one(
    task: ModuleType, hopper: str
) -> None:
    import gymnasium

    torch.manual_seed(0)
    model = task.build_model(hopper, width=8, dropout=0.5, episodes=3).train()
    together = [episode["return"] for episode in task.play(model, "Hopper-v5", range(3))]
    assert model.training  # as it was found, though it played without dropout
    assert task.metrics(model) == {"return": pytest.approx(sum(together) / 3)}
    model.eval()
    for seed, expected in enumerate(together):
        env = gymnasium.make("Hopper-v5")
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            with torch.no_grad():
                action = model(torch.tensor(observation[None], dtype=torch.float32))[0].numpy()
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        env.close()
        assert total == pytest.approx(expected, rel=1e-3)
    assert len(set(together)) == 3  # they do not begin alike


def test_an_episode_earns_the_same_whatever_is_played_beside_it(
    task: ModuleType, hopper: str
) -> None:
    torch.manual_seed(0)
    model = task.build_model(hopper, width=128)
    parts = list(task.score_parts(10))
    together = task.scores(model, parts)  # two of them wait until others have ended
    for some in (slice(None, None, -1), slice(9, None)):
        apart = task.scores(model, parts[some])
        for one, other in zip(together[some], apart, strict=True):
            assert one == pytest.approx(other, rel=1e-6)  # but for rounding, if at all
    assert all(0 < episode["length"] < 1000 for episode in together)


def test_episodes_to_choose_by_are_never_those_that_are_reported(task: ModuleType) -> None:
    metrics, selection, heldout = range(20), task.score_parts(), task.heldout_parts()
    assert len({*metrics, *selection, *heldout}) == 20 + 500 + 100
    with pytest.raises(TaskError, match=r"args\.score_episodes: must be 1 to 1,000,000, found 0"):
        task.score_parts(0)


@pytest.mark.parametrize(
    ("data", "env"),
    [
        ("hopper-medium-expert", "Hopper-v5"),
        ("d4rl/Walker2d_medium-v2.hdf5", "Walker2d-v5"),
        ("mujoco/halfcheetah/medium-v0", "HalfCheetah-v5"),
        ("lunarlander-expert", "LunarLander-v3"),
        ("/data/walker2d+halfcheetah/halfcheetah_medium-v2.hdf5", "HalfCheetah-v5"),
        ("walker2d/hopper/medium-v0/", "Hopper-v5"),
    ],
)
def test_the_name_of_the_data_tells_the_environment(task: ModuleType, data: str, env: str) -> None:
    assert task.environment_of(data) == env


@pytest.mark.parametrize(
    "data", ["hopper/walker2d+halfcheetah.hdf5", "hopper/walker2d+halfcheetah/medium-v0"]
)
def test_a_name_with_two_environments_asks_for_one(task: ModuleType, data: str) -> None:
    told = r"is Walker2d-v5 or HalfCheetah-v5; name it in args: env[^\n]*$"
    with pytest.raises(TaskError, match=told):
        task.environment_of(data)


def test_an_unknown_environment_must_be_named(task: ModuleType, tmp_path: Path) -> None:
    data = str(write_d4rl(tmp_path / "x.hdf5", make_episodes([30] * 20)))
    with pytest.raises(TaskError, match="name it in args: env"):
        task.environment_of("x.hdf5")
    assert task.build_model(data, env="Hopper-v5").env == "Hopper-v5"


def test_an_environment_that_does_not_fit_the_data_is_told(task: ModuleType, hopper: str) -> None:
    with pytest.raises(
        TaskError, match=r"Walker2d-v5: has observations of shape \(17,\), the data"
    ):
        task.metrics(task.build_model(hopper, env="Walker2d-v5", episodes=1))
    with pytest.raises(TaskError, match=r"args\.episodes: must be 1 or more"):
        task.build_model(hopper, episodes=0)


# what its README says


def test_either_way_to_install_the_settings_brings_all_that_their_readmes_use() -> None:
    extras = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(extras["plot"]) <= set(extras["settings"])  # pip install -e '.[settings]'
    assert set(extras["settings"]) <= set(extras["dev"])  # make data


# whole runs


def run(script: str, *options: object) -> str:
    """A script in a process of its own; what it printed."""
    ended = subprocess.run(
        [sys.executable, FOLDER / script, *map(str, options)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def train(task: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, bytes]]:
    """train.py with few steps, in this process, as importing torch takes longer; its files."""
    assert task.build_model

    def call(data: object, out: Path, *options: object) -> dict[str, bytes]:
        few = ("--before", 30, "--checkpoints", 12, "--every", 5, "--width", 16)
        words = ["train.py", "--data", data, "--out", out, *few, *options]
        with monkeypatch.context() as context, torch.random.fork_rng():
            context.setattr(sys, "argv", [str(word) for word in words])
            runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
        return {path.name: path.read_bytes() for path in out.iterdir()}

    return call


def test_training_depends_on_its_seed_alone_and_leaves_another_runs_checkpoints(
    train: Callable[..., dict[str, bytes]], hopper: str, tmp_path: Path
) -> None:
    first = train(hopper, tmp_path / "a", "--seed", 3)
    assert set(first) == {f"step-{step}.safetensors" for step in range(35, 91, 5)}
    assert train(hopper, tmp_path / "b", "--seed", 3) == first
    assert train(hopper, tmp_path / "c", "--seed", 4) != first
    for others in (("--every", 100), ("--seed", 4)):  # files of other names, and of the same
        with pytest.raises(SystemExit, match=r"^error: .*a: has checkpoints of another run[^\n]*$"):
            train(hopper, tmp_path / "a", *others)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == first


def test_training_needs_no_environment(
    train: Callable[..., dict[str, bytes]], tmp_path: Path
) -> None:
    data = write_d4rl(tmp_path / "x.hdf5", make_episodes([30] * 20))
    assert len(train(data, tmp_path / "a")) == 12


def test_training_on_what_is_not_there_is_one_line(
    train: Callable[..., dict[str, bytes]], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"^error: nowhere: no such data; `make data`[^\n]*$"):
        train("nowhere", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_experts_leave_d4rls_columns_the_same_on_any_number_of_processes(
    recorded: ModuleType, tmp_path: Path
) -> None:
    for processes in (1, 2):
        out = tmp_path / str(processes)
        run("experts.py", "--quick", "--out", out, "--processes", processes)
    names = ["lunarlander-expert.hdf5", "lunarlander-medium.hdf5"]
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == names
    means = {}
    for name in names:
        with h5py.File(tmp_path / "1" / name) as one, h5py.File(tmp_path / "2" / name) as two:
            dtypes = {key: one[key].dtype.str for key in one if key != "metadata"}
            assert dtypes == {
                "observations": "<f4",
                "actions": "<f4",
                "rewards": "<f4",
                "terminals": "|b1",
                "timeouts": "|b1",
            }
            for key in dtypes:
                np.testing.assert_array_equal(one[key][()], two[key][()])
            ends = (one["terminals"][()] | one["timeouts"][()]).sum()
            means[name] = one["rewards"][()].sum() / ends
            assert one["terminals"][-1] or one["timeouts"][-1]  # whole episodes
            assert len(recorded.read(tmp_path / "1" / name)) == ends
    assert means[names[0]] > means[names[1]] + 30  # an expert is one
    assert means[names[0]] > 200  # "solved", says gymnasium


def test_experts_leave_what_is_there(tmp_path: Path) -> None:
    mine = tmp_path / "lunarlander-medium.hdf5"
    mine.write_text("mine")
    assert "lunarlander-medium.hdf5: already there" in run(
        "experts.py", "--quick", "--out", tmp_path, "--processes", 1
    )
    assert mine.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, "lunarlander-expert.hdf5"}


def test_a_policy_is_cloned_selected_and_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[..., dict[str, bytes]],
    sewa: Sewa,
) -> None:
    copied = shutil.ignore_patterns("ckpts*", "averaged*", "__pycache__")
    shutil.copytree(FOLDER, tmp_path / "run", ignore=copied)
    monkeypatch.chdir(tmp_path / "run")
    random = np.random.default_rng(1)
    episodes = []
    for _ in range(20):  # actions that can be learned from the observations
        observations = random.standard_normal((40, 11)).astype(np.float32)
        episodes.append((observations, np.tanh(observations[:, :3])))
    data = write_d4rl(tmp_path / "hopper-tiny.hdf5", episodes)
    train(data, Path("ckpts"))
    few = [f"args.data={data}", "args.width=16", "args.selection=60", "args.episodes=2"]
    few.append("gumbel.iterations=8")
    options = [word for setting in few for word in ("--set", setting)]

    ended = sewa("select", "--K", 4, *options)
    assert ended.code == 0, ended.err
    report = json.loads(Path("averaged.report.json").read_text())
    assert (report["k"], report["K"]) == (12, 4)
    assert report["average"]["metrics"]["return"] > 0
    averaged, newest = (load_file(path) for path in ("averaged.safetensors", ended.out.split()[-1]))
    assert set(averaged) == set(newest)
    torch.testing.assert_close(averaged["mean"], newest["mean"])

    methods = ("--methods", "lawa,swa,ema,random,sewa")
    ended = sewa("compare", *methods, "--K", 4, "--format", "csv", *options)
    assert ended.code == 0, ended.err
    table = list(csv.DictReader(io.StringIO(ended.out)))
    assert {"lawa", "swa", "ema", "random", "sewa"} <= {row["method"] for row in table}

    settings = {"data": str(data), "width": 16, "score_episodes": 3, "heldout_episodes": 2}
    scoring = load_task("./task.py", settings).scoring
    assert scoring is not None
    assert scoring.at_once
    assert scoring.parts is not None
    assert scoring.heldout is not None
    assert (len(scoring.parts.list()), len(scoring.heldout.list())) == (3, 2)
