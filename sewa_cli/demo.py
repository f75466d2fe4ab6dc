"""`sewa demo`: a real run, small enough to watch. Trains, saves 100 checkpoints, averages them.

The learning rate is high and the batches small, so the weights never settle: that is where the
last checkpoint is a matter of luck and choosing pays. Such a run multiplies every rounding error;
it is trained on one thread, as sums over several round otherwise. Another processor may still give
another run.
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
from sewa_cli.session.extensions import load_settings
from sewa_cli.task import load_task
from sewa_cli.templates import write_template

CHECKPOINTS = 100
WARM_UP = 600  # steps before the first checkpoint
SPACING = 10  # steps between two checkpoints
BATCH = 16
LEARNING_RATE = 0.2
MOMENTUM = 0.8


def run_demo(folder: Path, seed: int, events: Events, *, force: bool = False) -> Selection:
    """Fill `folder` with sewa.yaml, task.py and ckpts/, and select from it."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the demo's digits need scikit-learn: pip install 'sewa-cli[demo]'"
        ) from None
    checkpoints = folder / "ckpts"
    if checkpoints.exists() and any(checkpoints.iterdir()) and not force:
        raise OutputError(f"{checkpoints}: exists; use --force, or another folder")
    write_template("demo", folder, force)
    checkpoints.mkdir(exist_ok=True)
    task = load_task(str(folder / "task.py"), {})
    if task.training_data is None:
        raise ConfigError("the demo's task has no training data")
    images, labels = (torch.cat(parts) for parts in zip(*task.training_data, strict=True))
    for n, (step, model) in enumerate(train(task.build_model, images, labels, seed), 1):
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
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
) -> Iterator[tuple[int, nn.Module]]:
    """Plain SGD with momentum at a noisy learning rate; yields (step, model) at each checkpoint."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(1, WARM_UP + CHECKPOINTS * SPACING + 1):
            chosen = torch.randint(len(labels), (BATCH,), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step > WARM_UP and step % SPACING == 0:
                yield step, model
    finally:
        torch.set_num_threads(threads)
