"""`task: classification`: any model function, on arrays or a folder of images."""

import json

import numpy as np
import pytest
import torch
from helpers.hf_runs import COLOURS, write_images
from helpers.objectives import metrics_of
from helpers.tiny import train_tiny
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task import load_task

NET = """
from torch import nn

def make_net(width=16):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))

def make_conv():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))

number = 3
"""


def arrays(seed, rows=130):
    x = np.random.default_rng(seed).standard_normal((rows, 6)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] * x[:, 1] > 0).astype(np.int64)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Arrays, a net.py, twelve checkpoints of it, and the YAML; and we are elsewhere."""
    folder = tmp_path / "run"
    train_tiny(folder / "ckpts")
    (folder / "net.py").write_text(NET)
    np.savez(folder / "selection.npz", **arrays(1))
    np.savez_compressed(folder / "heldout.npz", **arrays(2))
    (folder / "sewa.yaml").write_text(
        "task: classification\n"
        "args:\n"
        "  model: net.py:make_net\n"
        "  model_args: {width: 16}\n"
        "  selection: selection.npz\n"
        "  heldout: heldout.npz\n"
        "  batch_size: 50\n"
        "checkpoints: ckpts/\nK: 4\ndevice: cpu\ngumbel: {iterations: 8}\n"
    )
    monkeypatch.chdir(tmp_path)
    return folder


def test_select_reports_the_loss_and_accuracy_of_the_written_file(run, sewa):
    ended = sewa("select", "--config", run / "sewa.yaml", "-o", "out.safetensors", "--json")
    assert ended.code == 0, ended.err
    average = json.loads(ended.out)["average"]
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    model.load_state_dict(load_file("out.safetensors"))
    x, y = (torch.from_numpy(array) for array in arrays(2).values())
    with torch.no_grad():
        outputs = model(x)
    assert average["heldout_loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-5)
    right = float((outputs.argmax(1) == y).double().mean())
    assert average["metrics"] == {"accuracy": pytest.approx(right, abs=1e-9)}


def task_args(run, **others):
    return {"model": f"{run / 'net.py'}:make_net", "selection": run / "selection.npz", **others}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "make_net"}, "args.model: must look like package.module:function"),
        ({"x": "images"}, "selection.npz: no array 'images'; there are x, y"),
        ({"size": 8}, "args: .npz files have no size"),
        ({"loss": "hinge"}, "args.loss: must be 'cross-entropy' or 'mse', found 'hinge'"),
        ({"Batch_size": 8}, "args.Batch_size: unknown key; did you mean batch_size?"),
        ({"y": "x"}, "x: must be whole numbers, one per row, found float32 [130, 6]"),
    ],
)
def test_wrong_args_are_reported_in_one_line(change, message, run):
    with pytest.raises((ConfigError, TaskError)) as caught:
        load_task("classification", task_args(run) | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros((3, 6)), "y": np.zeros(4, dtype=int)}, "3 rows of x, but 4 of y"),
        ({"x": np.zeros((0, 6)), "y": np.zeros(0, dtype=int)}, "x: holds no rows"),
        ({"x": np.zeros((2, 6)), "y": np.array([1, -1])}, "y: row 2: -1 is not a class"),
        ({"x": np.array(["a", "b"]), "y": np.array([0, 1])}, "x: must be numbers, found <U1"),
        ({"x": np.array([{}, 1]), "y": np.array([0, 1])}, "Object arrays cannot be loaded"),
    ],
)
def test_bad_arrays_are_reported_in_one_line(content, message, run):
    for save in (np.savez, np.savez_compressed):
        save(run / "bad.npz", **content)
        with pytest.raises(TaskError) as caught:
            load_task("classification", task_args(run, selection=run / "bad.npz"))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    (run / "bad.npz").write_bytes(b"no zip")
    with pytest.raises(TaskError, match=r"bad\.npz: cannot be read as \.npz"):
        load_task("classification", task_args(run, selection=run / "bad.npz"))


def test_mse_is_the_mean_over_all_numbers(run):
    y = np.random.default_rng(0).standard_normal((20, 2))
    parts = {"selection": run / "numbers.npz", "heldout": run / "more.npz"}
    for path in parts.values():
        np.savez(path, x=arrays(0, 20)["x"], y=y)
    args = task_args(run) | parts | {"loss": "mse", "batch_size": 20}
    task = load_task("classification", args)
    model = task.build_model()
    [batch] = task.selection_data
    with torch.no_grad():
        outputs = task.predict(model, batch)
        loss = task.loss(outputs, batch)
    assert float(loss) == pytest.approx(float(F.mse_loss(outputs, batch["targets"])), rel=1e-6)
    error = float((outputs - batch["targets"]).abs().mean())
    found = metrics_of(task, model, task.selection_data)
    assert found == {"mean_absolute_error": pytest.approx(error, rel=1e-5)}


@pytest.mark.parametrize("batch_size", [50, 100])
def test_parts_are_few_rows_and_their_mean_accuracy_is_that_of_all(run, batch_size):
    args = task_args(run, heldout=run / "heldout.npz", batch_size=batch_size)
    task = load_task("classification", args)
    model = task.build_model().eval()
    for seed, parts in ((1, task.scoring.parts.list()), (2, task.scoring.heldout.list())):
        counts = [sum(rows.stop - rows.start for rows in part) for part in parts]
        assert sum(counts) == 130
        assert 25 <= min(counts) <= max(counts) <= 32
        found = [score["accuracy"] for score in task.scoring.score(model, parts)]
        x, y = (torch.from_numpy(array) for array in arrays(seed).values())
        expected = float((model(x).argmax(1) == y).double().mean())
        assert np.average(found, weights=counts) == pytest.approx(expected, abs=1e-9)
        assert len(set(found)) > 1


def image_args(run):
    for seed, part in enumerate(("selection", "heldout", "training")):
        write_images(run / part, 12, seed)
    parts = {part: run / part for part in ("selection", "heldout", "training")}
    return {"model": f"{run / 'net.py'}:make_conv", **parts, "size": 8}


def test_images_of_a_folder_are_resized_scaled_and_normalised(run):
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    settings = {"size": [8, 6], "mean": mean, "std": std, "batch_size": 5}
    task = load_task("classification", image_args(run) | settings)
    assert "labels in sorted order: blue=0, green=1, red=2" in task.notes
    seen = []
    for batch in task.heldout_data:
        assert batch["x"].shape[1:] == (3, 8, 6)
        seen += list(zip(batch["x"], batch["targets"].tolist(), strict=True))
    assert len(seen) == 12
    for i in range(12):
        colour = COLOURS[i % 3]
        image = Image.open(run / "heldout" / colour / f"{i}.png").resize((6, 8))
        naive = (np.asarray(image) / 255 - mean) / std
        naive_pixels = torch.tensor(naive.transpose(2, 0, 1), dtype=torch.float32)
        assert any(
            label == i % 3 and torch.allclose(x, naive_pixels, atol=1e-5) for x, label in seen
        )
