"""Writes a model's bare weights to one safetensors file, and knows the steps when that is due."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sewa_cli.callbacks.means import IntervalMean, identity, unwrap
from sewa_cli.callbacks.watch import Loss
from sewa_cli.checkpoints import means
from sewa_cli.publish import new_file

log = logging.getLogger(__name__)
Folder = str | os.PathLike[str]


def save_weights(
    model: nn.Module,
    folder: Folder,
    step: int,
    metrics: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    mean: IntervalMean | None = None,
) -> Path:
    """Write the weights as `folder`/step-<step>.safetensors, and return that path.

    metrics  numbers to keep in the file's metadata, as JSON under `metrics`, next to `step`
    dtype    of floating-point tensors in the file (torch.bfloat16: half the size); None: as is
    mean     also written, as step-<step>.mean.safetensors; it then begins again

    DistributedDataParallel, DataParallel and torch.compile are unwrapped, tied tensors saved once.
    A file of the same step is replaced. The file appears whole or not at all. In a distributed
    run, call it on rank 0 only.
    """
    model = unwrap(model)
    check_whole(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}.safetensors"
    # "format": transformers asks for it when such a file is loaded as model.safetensors
    metrics = {**(metrics or {}), **(mean.watched(step) if mean else {})}
    metadata = {"format": "pt", "step": str(step), "metrics": as_json(metrics)}
    of_mean = path.with_suffix(means.SUFFIX)
    if mean is None:
        of_mean.unlink(missing_ok=True)  # of another run
    else:  # first, so that a run that is killed here has no snapshot without a mean
        if mean.model is not model:
            raise ValueError("mean is of another model; make it with IntervalMean(model)")
        weights = _bare_weights(mean.state_dict(), dtype)
        write(of_mean, weights, metadata | mean.metadata(step))
        mean.reset()
    write(path, _bare_weights(model.state_dict(), dtype), metadata)
    return path


def write(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with new_file(path) as file:
        save_file(weights, file.name, metadata)


def check_whole(model: nn.Module) -> None:
    """Refuse a model of which this process holds only a shard."""
    sharded = any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())
    sharded = sharded or any(
        type(tensor.data).__name__ == "DTensor" or hasattr(tensor, "ds_id") or tensor.is_meta
        for tensor in model.parameters()
    )
    if sharded:
        raise ValueError(
            "the model is sharded over processes (FSDP, DeepSpeed, tensor parallel), so no process "
            "has all the weights; let the trainer save full checkpoints, or write "
            "IntervalMean(model).state_dict() with torch.distributed.checkpoint"
        )


def _bare_weights(state: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies on the CPU, contiguous, each tensor once, under the first of its names."""
    weights: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):  # extra state of some layers
            continue
        if tensor.numel() and identity(tensor) in seen:
            continue
        seen.add(identity(tensor))
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        weights[name.replace("_orig_mod.", "")] = tensor.detach().to(
            "cpu", kind, copy=True, memory_format=torch.contiguous_format
        )
    return weights


def as_json(metrics: Mapping[str, Any]) -> str:
    """Numbers only; what is not finite is null, as JSON has no NaN."""
    numbers = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):  # text, or a tensor of several numbers
            number = float(value.detach() if isinstance(value, Tensor) else value)
            numbers[str(name)] = number if math.isfinite(number) else None
    return json.dumps(numbers)


class Saver:
    """Saves bare weights every `every` optimizer steps in the last part of the training.

    folder     of the files step-<n>.safetensors; made if it is not there
    every      optimizer steps between two files; the last step is saved as well
    start      the fraction of all steps before the first file
    dtype      of the files; None: as in the model
    overwrite  let a new run write into a folder that has such files already
    means      also save the mean of the weights since the last save: True, of every step; N, of
               every N-th; "cpu": of every step, kept in host memory
    watch      watch(model): the loss on a small held-out set. At each save, one line says what an
               average of the last interval means has; needs `means`

    On rank 0 only. The newest logged numbers (loss, eval_loss …) are kept in the metadata.
    """

    def __init__(
        self,
        folder: Folder,
        every: int = 50,
        start: float = 0.75,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
        means: int | Literal["cpu"] = False,
        watch: Loss | None = None,
    ) -> None:
        super().__init__()  # the trainer's own Callback
        if watch is not None and means is False:
            raise ValueError("watch needs interval means; add means=True")
        self.folder = Path(folder)
        self._moments = Moments(every, start)
        self._dtype = dtype
        self._overwrite = overwrite
        self._means = means
        self._watch = watch
        self._mean: IntervalMean | None = None

    def _begin(self, model: nn.Module, step: int, total: float, is_writer: bool) -> None:
        self._moments.check_total(total)
        self._mean = None
        if not is_writer:
            return
        refuse_another_run(self.folder, step, self._overwrite)
        if self._means is not False:
            self._mean = mean_of(model, self._means, self._watch)
            if self._moments.cuts(step, total):
                log.warning(
                    "resumed at step %d: the next interval mean has only the steps after it", step
                )

    def _after(
        self,
        model: nn.Module,
        before: int,
        step: int,
        total: float,
        metrics: Callable[[], Mapping[str, Any]],
        writes: bool,
    ) -> None:
        """Save if it is due; the run was at step `before` and is now at `step`."""
        if self._mean is not None and step > before:
            self._mean.update(step - before)
        if self._moments.is_due(before, step, total):
            check_whole(unwrap(model))  # on every rank, so that all of them stop
            if writes:
                save_weights(model, self.folder, step, metrics(), self._dtype, self._mean)
        elif self._mean is not None and self._moments.is_multiple(before, step):
            self._mean.reset()  # the first file's mean is of no more steps than the others


def mean_of(
    model: nn.Module, means: int | Literal["cpu"], watch: Loss | None = None
) -> IntervalMean:
    every, device = (1, "cpu") if means == "cpu" else (int(means), None)
    return IntervalMean(model, every, device, watch)


@dataclass(frozen=True)
class Moments:
    """Every `every` steps after the fraction `start` of the run, and its last step."""

    every: int
    start: float

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps, found {self.every!r}")
        if not 0 <= self.start < 1:
            raise ValueError(f"start must be a fraction of the run, 0 to 1, found {self.start!r}")

    def check_total(self, total: float) -> None:
        if self.start > 0 and not 0 < total < math.inf:
            raise ValueError(
                "the number of steps is not known in advance, so neither is the last part of the "
                "run; give the trainer max_steps, or use start=0"
            )

    def is_due(self, before: int, step: int, total: float) -> bool:
        """Whether a run that was at step `before` and is now at `step` of `total` is saved."""
        if step <= before or (self.start > 0 and step < self.start * total):
            return False
        return self.is_multiple(before, step) or step >= total

    def is_multiple(self, before: int, step: int) -> bool:
        return step // self.every > before // self.every

    def cuts(self, step: int, total: float) -> bool:
        """Whether a run that is resumed at `step` has lost a part of the next interval."""
        return step % self.every > 0 and self.is_due(step, step + self.every, total)


def refuse_another_run(folder: Path, step: int, overwrite: bool) -> None:
    """A new run (at step 0) must not mix its files with those of an earlier one in `folder`.

    A resumed run replaces later steps as it reaches them: they are its own.
    """
    later = [path for path in folder.glob("step-*.safetensors") if _step(path) > step]
    if not later:
        return
    if step == 0 and not overwrite:
        raise FileExistsError(
            f"{folder}: holds {len(later)} checkpoints of an earlier run; "
            "choose another folder, empty it, or pass overwrite=True"
        )
    log.warning(
        "%s: %d checkpoints of steps after %d are replaced as the run reaches them; others stay",
        folder,
        len(later),
        step,
    )


def _step(path: Path) -> int:
    found = re.fullmatch(r"step-(\d+)\.safetensors", path.name)
    return int(found[1]) if found else -1
