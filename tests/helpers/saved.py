"""Reading back what a callback saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def save_distributed(content: dict[str, Any], folder: Path, flat: bool = False) -> Path:
    """A distributed checkpoint of one process; flat: without ways to its keys."""
    from torch.distributed import checkpoint

    planner = checkpoint.DefaultSavePlanner(flatten_state_dict=not flat)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        checkpoint.save(content, checkpoint_id=folder, planner=planner, no_dist=True)
    return folder


def steps(folder: Path) -> list[int]:
    assert not list(folder.glob(".*")), "something half-written is left"
    names = [path.stem.removeprefix("step-") for path in folder.iterdir()]
    return sorted(int(name) for name in names if not name.endswith(".mean"))


def assert_mean(file: Path | str, states: list[dict[str, Any]]) -> None:
    for name, tensor in load_file(file).items():
        mean = torch.stack([state[name].double() for state in states]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def assert_means(folder: Path, expected: dict[int, list[dict[str, Any]]]) -> None:
    """Compare interval means with the weights of all steps, which a slow twin kept in lists."""
    assert steps(folder) == sorted(expected)
    for step, kept in expected.items():
        path = folder / f"step-{step}.mean.safetensors"
        found = load_file(path)
        assert set(found) == set(load_file(folder / f"step-{step}.safetensors"))
        assert_mean(path, kept)
        assert metadata(path)["sewa_mean_steps"] == str(len(kept))
