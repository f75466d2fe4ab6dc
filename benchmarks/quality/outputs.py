"""The outputs of all checkpoints of a training run, predicted around one base and kept on disk.

What an average of the checkpoints scores is then a function of its coefficients alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plan import Setting
from running import place, train
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

STEP = 0.1  # how far towards each checkpoint the model is evaluated
RATIO = 1.6  # from one window to the next
QUARTERS = 4


class Run:
    """The last k checkpoints of a training run as rows of W, with the sample's model and data."""

    def __init__(self, setting: Setting, folder: Path, seed: int) -> None:
        task = load_task(setting.home)
        data = dict(pair.split("=", 1) for pair in setting.args)
        plays = {"env": "none"} if setting.metric == "return" else {}
        self.model = task.build_model(**data, **plays).eval()
        state = self.model.state_dict()
        self._state = {name: x for name, x in state.items() if x.is_floating_point()}
        files = (place(folder, setting, seed) / "ckpts").glob("step-*.safetensors")
        in_order = sorted(files, key=lambda path: int(path.stem.split("-")[1]))[-setting.k :]
        self.weights = torch.stack([self._flat(load_file(path)) for path in in_order])
        selection = task.selection_data(selection=setting.sizes[-1], **data)
        self._batch = len(selection[0][0])
        self.selection = joined(selection)
        self.heldout = joined(task.heldout_data(**data))
        self._layers = [x for x in self.model.modules() if isinstance(x, _BatchNorm)]
        self._statistics = joined(task.training_data(**data))[0] if self._layers else None

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].float().flatten() for name in self._state])

    def _set(self, flat: Tensor) -> None:
        parts = flat.split([x.numel() for x in self._state.values()])
        for tensor, part in zip(self._state.values(), parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def selection_outputs(self, flat: Tensor, index: Tensor | None = None) -> Tensor:
        """Weights [P] → outputs [n, c], by each batch's statistics where there is BatchNorm."""
        self._set(flat)
        for layer in self._layers:
            layer.training, layer.track_running_stats = True, False
        inputs = self.selection[0]
        return self._run(inputs if index is None else inputs[index])

    @torch.no_grad()
    def heldout_outputs(self, flat: Tensor) -> Tensor:
        """Weights [P] → outputs [n, c], by recomputed statistics as in the file that is written."""
        self._set(flat)
        for layer in self._layers:
            layer.training, layer.track_running_stats, layer.momentum = True, True, None
            layer.reset_running_stats()
        if self._statistics is not None:
            self._run(self._statistics)
        self.model.eval()
        return self._run(self.heldout[0])

    def _run(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.model(some) for some in inputs.split(self._batch)])

    def heldout_loss(self, coefficients: Tensor) -> float:
        """Return the true held-out loss of the averaged weights."""
        outputs = self.heldout_outputs(coefficients.float() @ self.weights)
        return float(example_losses(outputs, self.heldout[1]).mean())


def load_task(home: Path) -> Any:
    """Import a sample's task.py with the modules next to it, under a name of its own."""
    sys.path.insert(0, str(home))
    try:
        spec = importlib.util.spec_from_file_location(f"{home.name}_task", home / "task.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(home))


def joined(batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of all batches."""
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def example_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [..., n, c] → the loss of each example, [..., n] float64."""
    if targets.is_floating_point():
        return (outputs - targets).double().square().mean(-1)
    wanted = targets.expand(outputs.shape[:-1])
    flat = cross_entropy(outputs.flatten(0, -2), wanted.flatten(), reduction="none")
    return flat.view(wanted.shape).double()


def output_gradients(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of each example's loss in its outputs, [..., n, c]."""
    if targets.is_floating_point():
        return 2 * (outputs - targets) / outputs.shape[-1]
    index = targets.expand(outputs.shape[:-1])[..., None]
    gradient = outputs.softmax(-1)
    return gradient.scatter_add_(-1, index, gradient.new_full(index.shape, -1.0))


@dataclass(frozen=True)
class Part:
    """Examples with the predicted outputs of all checkpoints and the true losses of baselines.

    outputs  [k, n, c]; the average with coefficients c is predicted to have the outputs Σ c_i y_i
    targets  [n] classes or [n, c] numbers
    losses   [A, n] of the baselines' true outputs
    """

    outputs: Tensor
    targets: Tensor
    losses: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, index: Tensor) -> Part:
        return Part(self.outputs[:, index], self.targets[index], self.losses[:, index])

    def predict(self, coefficients: Tensor) -> Tensor:
        """Coefficients [p, k] → predicted losses of the examples, [p, n]."""
        return example_losses(self._mix(coefficients), self.targets)

    def gradient(self, coefficients: Tensor, shares: Tensor) -> Tensor:
        """Return the gradients of p losses at [p, k]: means of examples with shares [p, n]."""
        slopes = output_gradients(self._mix(coefficients), self.targets)
        slopes *= shares[..., None].float()
        return (slopes.flatten(1) @ self.outputs.flatten(1).T).double()

    def _mix(self, coefficients: Tensor) -> Tensor:
        mixed = coefficients.float() @ self.outputs.flatten(1)
        return mixed.view(-1, *self.outputs.shape[1:])


@dataclass(frozen=True)
class Cache:
    """All that estimators and their judge need of a run; `averages` [A, k] are the baselines."""

    names: list[str]
    averages: Tensor
    selection: Part
    heldout: Part


def windows(k: int) -> list[int]:
    """Return windows of moving averages from 1 to 2k, each 1.6 times the one before."""
    found, window = [1], 1.0
    while round(window := window * RATIO) < k:
        found += [round(window)] if round(window) > found[-1] else []
    return [*found, k, 2 * k]


def moving_average(k: int, window: int) -> Tensor:
    """Return coefficients [k] of m ← d·m + (1 − d)·w with d = (w − 1)/(w + 1)."""
    decay = (window - 1) / (window + 1)
    found = decay ** torch.arange(k - 1, -1, -1, dtype=torch.float64)
    found[1:] *= 1 - decay
    return found


def baselines(k: int) -> dict[str, Tensor]:
    """Return moving averages and the mean of all, then the means of the run's quarters."""
    found = {f"window {w}": moving_average(k, w) for w in windows(k)}
    found["mean of all"] = torch.full((k,), 1 / k, dtype=torch.float64)
    quarters = torch.arange(k) * QUARTERS // k
    for quarter in range(QUARTERS):
        members = (quarters == quarter).double()
        found[f"quarter {quarter + 1}"] = members / members.sum()
    return found


def load_cache(setting: Setting, folder: Path, seed: int) -> Cache:
    """Train and run the model where that has not been done, and load what was kept."""
    path = folder / "outputs" / f"{setting.name} seed {seed}.pt"
    if not path.exists():
        train(folder, setting, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(record(Run(setting, folder, seed)), temporary)
        temporary.replace(path)
    found = torch.load(path)
    averages = baselines(setting.k)
    parts = (Part(*found[name]) for name in ("selection", "heldout"))
    return Cache(list(averages), torch.stack(list(averages.values())), *parts)


def record(run: Run) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Run the baselines, then linearise around moving averages weighted by exp(−z²)."""
    averages = torch.stack(list(baselines(len(run.weights)).values()))
    moving = averages[:-QUARTERS]
    found, base = {}, moving[0]
    for name, run_model, targets in (
        ("selection", run.selection_outputs, run.selection[1]),
        ("heldout", run.heldout_outputs, run.heldout[1]),
    ):
        outputs = [run_model(c.float() @ run.weights) for c in averages]
        losses = torch.stack([example_losses(one, targets) for one in outputs])
        if name == "selection":
            shares = torch.exp(-(behind_in_errors(losses[:-QUARTERS]) ** 2))
            base = shares / shares.sum() @ moving
        found[name] = linearised(run_model, run.weights, base), targets, losses
    return found


def linearised(run_model: Callable[[Tensor], Tensor], weights: Tensor, base: Tensor) -> Tensor:
    """Predict the outputs of all checkpoints, [k, n, c], from a step towards each.

    `base` [k]: coefficients of the average that the steps start from; its outputs are exact.
    """
    flat = base.float() @ weights
    exact = run_model(flat)
    steps = [run_model(torch.lerp(flat, row, STEP)) - exact for row in weights]
    found = torch.stack(steps).div_(STEP)
    return found.sub_(torch.tensordot(base.float(), found, 1)).add_(exact)


def behind_in_errors(losses: Tensor) -> Tensor:
    """Return how far each mean of losses [J, n] is behind the best, in standard errors, [J]."""
    means = losses.mean(1)
    differences = losses - losses[int(means.argmin())]
    error = differences.std(1) / losses.shape[1] ** 0.5
    return differences.mean(1) / error.clamp_min(1e-7 * float(means.abs().min()) + 1e-300)
