"""`sewa demo`: an ordinary run, small enough to watch, and what averaging its checkpoints gains.

The learning rate is constant. The run ends well, but each checkpoint carries the noise of its last
steps, which an average removes.

Every processor gives the same checkpoints. Sums are rounded differently on each, and training
amplifies such differences; so gradients are computed in float64 and rounded to a coarse grid.
Weights then lie on a grid too, and float32 holds them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sewa_cli.commands.select import Selection, run_select
from sewa_cli.errors import ConfigError, OutputError
from sewa_cli.events import Events
from sewa_cli.extensions import load_settings
from sewa_cli.task import load_task
from sewa_cli.templates import write_template

CHECKPOINTS = 100
WARM_UP = 1000  # steps before the first checkpoint
SPACING = 20  # steps between two checkpoints
BATCH = 16
LEARNING_RATE = 2.0**-2  # a power of two: it rounds nothing
GRADIENT_GRID = 2.0**-18
WEIGHT_GRID = GRADIENT_GRID * LEARNING_RATE


def run_demo(folder: Path, seed: int, events: Events, *, force: bool = False) -> Selection:
    """Fill `folder` with sewa.yaml, task.py and ckpts/, and select from it."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError("the demo's digits need scikit-learn: pip install scikit-learn") from None
    checkpoints = folder / "ckpts"
    if checkpoints.exists() and any(checkpoints.iterdir()) and not force:
        raise OutputError(f"{checkpoints}: exists; use --force, or another folder")
    write_template("demo", folder, force)
    checkpoints.mkdir(exist_ok=True)
    task = load_task(str(folder / "task.py"), {})
    if task.training_data is None:
        raise ConfigError("the demo's task has no training data")
    images, labels = (torch.cat(parts) for parts in zip(*task.training_data, strict=True))
    for n, (step, state) in enumerate(train(task.build_model, images, labels, seed), 1):
        save_file(state, checkpoints / f"step-{step}.safetensors", {"step": str(step)})
        events.progress("training", n, CHECKPOINTS)
    flags = {
        "checkpoints": (checkpoints,),
        "seed": seed,
        "output": str(folder / "demo.safetensors"),
    }
    config = load_settings(folder / "sewa.yaml", flags)
    return run_select(config, task, events, force=force)


def train(
    build_model: Callable[[], nn.Module], images: torch.Tensor, labels: torch.Tensor, seed: int
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Train by SGD on images moved by up to a pixel; yield each checkpoint's step and weights."""
    model = build_in_float64(build_model, seed)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    moved = all_moves(images.double())
    for parameter in parameters:
        parameter.data = rounded(parameter.data, WEIGHT_GRID)
    for step in range(1, WARM_UP + CHECKPOINTS * SPACING + 1):
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        ways = torch.randint(len(moved), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(moved[ways, chosen]), labels[chosen])
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= LEARNING_RATE * rounded(gradient, GRADIENT_GRID)
        if step > WARM_UP and step % SPACING == 0:
            yield step, {name: tensor.float() for name, tensor in model.state_dict().items()}


def build_in_float64(build_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model so that its random weights differ between processors by 1e-16 at most."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build_model()
    finally:
        torch.set_default_dtype(usual)


def all_moves(images: torch.Tensor) -> torch.Tensor:
    """Return the images [n, 64] moved by up to a pixel each way, as [9, n, 64]."""
    squares = images.view(-1, 8, 8)
    pixels = (-1, 0, 1)
    moves = [squares.roll((down, right), (1, 2)) for down in pixels for right in pixels]
    return torch.stack(moves).flatten(2)


def rounded(values: torch.Tensor, grid: float) -> torch.Tensor:
    return torch.round(values / grid) * grid
