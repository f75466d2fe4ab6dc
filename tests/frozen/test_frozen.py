"""Runs of every trainer are read, and a trainer of today still leaves what is frozen here."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.frozen import FROZEN, RUNS, STEPS, Frozen
from helpers.tiny import Sewa
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor


def weights_of(run, step):
    """The weights as the trainer's own users read them."""
    if run in ("transformers", "sharded"):
        files = Path(f"run/checkpoint-{step}").glob("*.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    if run == "loop":
        return torch.load(f"run/ckpt_{step // 2}.pt")["model"]
    if run == "lightning":
        [file] = Path("run").glob(f"*step={step}.ckpt")
        return torch.load(file)["state_dict"]
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(f"run/step-{step}", "whole.pt")
    return torch.load("whole.pt")["model"]


@pytest.mark.filterwarnings("ignore:.*process group.*")
@pytest.mark.parametrize("name", [name for name in RUNS if name != "peft"])
def test_an_average_of_any_trainers_checkpoints_is_the_mean_of_their_weights(name, frozen, sewa):
    frozen(name)
    ended = sewa("average", "run", "--last", 3, "-o", "out.safetensors")
    assert ended.code == 0, ended.err
    states = [weights_of(name, step) for step in STEPS[-3:]]
    for key, tensor in load_file("out.safetensors").items():
        if tensor.is_floating_point():
            mean = sum(state[key].double() for state in states) / 3
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.breadth
@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_of_today_leaves_the_same_files_with_the_same_contents(name, tmp_path):
    command = [sys.executable, FROZEN / "make.py", name, "--into", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    assert described(tmp_path / name) == described(FROZEN / name)


def described(folder):
    """Every file by its name: keys, shapes and dtypes, but no values."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): contents(p) for p in files if p.suffix != ".pyc"}


def contents(path):
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
    if path.suffix == ".json":
        return shape_of(json.loads(path.read_text()))
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return shape_of(torch.load(path, weights_only=False))
    if path.name == ".metadata":
        metadata = pickle.loads(path.read_bytes())
        return {
            name: getattr(entry, "size", None)
            for name, entry in metadata.state_dict_metadata.items()
        }
    return "a file"


def shape_of(content):
    if isinstance(content, Tensor):
        return content.dtype, content.shape
    if isinstance(content, dict):
        return {key: shape_of(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [shape_of(content[0])] if content else []
    return type(content).__name__
