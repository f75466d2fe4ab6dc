"""Set-up that every command with a task shares: device, files, model, names, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sewa_cli import checkpoints as library
from sewa_cli.checkpoints import Checkpoint, Reads
from sewa_cli.config import Config
from sewa_cli.errors import CheckpointError, ConfigError, TaskError
from sewa_cli.events import Heard, Listener
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective, batchnorm_layers
from sewa_cli.report.shared import LeftOut
from sewa_cli.session.candidates import open_candidates
from sewa_cli.task import Task


@dataclass
class Bench:
    """Files opened, model built, names matched: what `select` and `validate` start from."""

    config: Config
    task: Task
    listener: Listener
    checkpoints: list[Checkpoint]
    model: FlatModel
    names: dict[str, str]  # model name → checkpoint name
    objective: Objective
    reads: Reads
    inputs: list[Path]  # never to be overwritten
    warnings: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    tier: str | None = None  # where W is, once it is placed
    failed_tiers: list[str] = field(default_factory=list)  # in which memory has run out

    def warn(self, text: str) -> None:
        """Once, however often it comes up: a checkpoint may be read again."""
        if text in self.warnings:
            return
        self.warnings.append(text)
        self.listener.warn(text)

    def keeps(self, checkpoint: Checkpoint, broken: str | None) -> bool:
        """Whether a checkpoint takes part; one with NaN or Inf is left out, or stops the run."""
        if broken is None:
            return True
        reason = f"{broken} holds NaN or Inf"
        if self.config.nonfinite == "error":
            raise CheckpointError(f"{checkpoint.path}: {reason}; --nonfinite skip leaves it out")
        out = LeftOut(path=str(checkpoint.path), step=checkpoint.step, reason=reason)
        self.left_out.append(out)
        self.warn(f"{checkpoint.path}: left out: {reason}")
        if len(self.left_out) == len(self.checkpoints):
            total = len(self.checkpoints)
            raise CheckpointError(f"all {total} checkpoints hold NaN or Inf; none is left")
        return False

    def load_integers(self, checkpoint: Checkpoint) -> None:
        named = ((n, s) for n, s in self.names.items() if not checkpoint.tensors[s].is_float)
        self.model.load((name, checkpoint.read(source)) for name, source in named)

    def floats(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one row of the trajectory, by the layout's names."""
        for name, source in self.names.items():
            if checkpoint.tensors[source].is_float:
                yield self.model.canonical(name), checkpoint.read(source)


def resolve_device(wanted: str) -> torch.device:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: {wanted!r} cannot be used here: {reason}") from error
    return device


def set_up(config: Config, task: Task, listener: Listener, K: int | None = None) -> Bench:
    """`K`: the largest budget, if it is not the config's."""
    reads = Reads()
    heard = Heard(listener)
    candidates, found = open_candidates(config, reads, heard)
    check_budget(config.K if K is None else K, candidates)
    objective = build_objective(config, task, candidates[-1])
    model = objective.model
    names = library.match_names(candidates[-1], model.aliases, model.shapes, model.layout.slices)
    library.check_tied(candidates[-1], model.aliases)
    inputs = [*found, Path(task.source), *task.files]
    bench = Bench(config, task, listener, candidates, model, names, objective, reads, inputs)
    bench.warnings += heard.warnings
    if candidates[0].step is None:
        bench.warn(
            "no checkpoint has a step in its metadata or name; they are taken in the order given"
        )
    return bench


def build_objective(config: Config, task: Task, newest: Checkpoint) -> Objective:
    """The user's model on its device, with the user's loss; of adapters, only they can change."""
    device = resolve_device(config.device)
    try:
        built = task.build_model()
        is_adapter = newest.kind == "adapter"
        only = library.check_fits(newest, built.state_dict()) if is_adapter else None
        model = FlatModel(built, device, only)
    except ValueError as error:
        raise TaskError(f"build_model(): {error}") from error
    if model.layout.size == 0:
        raise TaskError("build_model(): the model has no floating-point weights")
    anew = config.bn != "off" and bool(batchnorm_layers(model.module))
    return Objective(model, task.predict, task.loss, task.backward, batch_statistics=anew)


def check_budget(K: int, candidates: Sequence[Checkpoint]) -> None:
    k = len(candidates)
    if k == 1:
        raise CheckpointError(
            f"{candidates[0].path}: is the only checkpoint; there is none to choose"
        )
    if k <= K:
        raise ConfigError(
            f"K: {K} of {k} checkpoints leaves nothing to choose; K must be at most {k - 1}"
        )
