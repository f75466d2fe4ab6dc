"""Callbacks for transformers.Trainer.

Trainer(..., callbacks=[SaveForSewa("ckpts", every=50)])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from sewa_cli.callbacks.means import IntervalMean
from sewa_cli.callbacks.saving import Saver, as_json, check_whole, log, mean_of, write
from sewa_cli.callbacks.watch import Loss
from sewa_cli.checkpoints import Reads, means, open_checkpoint


class SaveForSewa(Saver, TrainerCallback):
    __doc__ = Saver.__doc__

    def on_train_begin(
        self, _: Any, state: TrainerState, *__: Any, model: nn.Module, **___: Any
    ) -> None:
        self._begin(model, state.global_step, state.max_steps, state.is_world_process_zero)

    def on_step_end(
        self, _: Any, state: TrainerState, *__: Any, model: nn.Module, **___: Any
    ) -> None:
        step = state.global_step
        span = step - 1, step, state.max_steps
        self._after(model, *span, lambda: _newest(state), state.is_world_process_zero)


def _newest(state: TrainerState) -> dict[str, Any]:
    newest = {name: value for entry in state.log_history for name, value in entry.items()}
    newest.pop("step", None)  # of the log entry, not of the weights
    return newest


class MeansForSewa(TrainerCallback):
    """Puts an interval mean into each of the Trainer's own checkpoints, as mean.safetensors.

    means  True: of every step since the last checkpoint; N, of every N-th; "cpu": of every step,
           kept in host memory
    watch  as of SaveForSewa
    """

    def __init__(self, means: int | Literal["cpu"] = True, watch: Loss | None = None) -> None:
        self._means = means
        self._watch = watch
        self._mean: IntervalMean | None = None

    def on_train_begin(
        self, _: Any, state: TrainerState, *__: Any, model: nn.Module, **___: Any
    ) -> None:
        check_whole(model)
        is_writer = state.is_world_process_zero
        self._mean = mean_of(model, self._means, self._watch) if is_writer else None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._mean is not None:
            self._mean.update()

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if self._mean is None:
            return
        step = state.global_step
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        found, wanted = self._mean.state_dict(), open_checkpoint(folder, Reads()).tensors
        if (folder / "adapter_config.json").is_file():
            from peft import get_peft_model_state_dict

            found = get_peft_model_state_dict(self._mean.model, state_dict=found)
        if missing := wanted.keys() - found.keys():
            log.warning("%s: no mean is saved: it lacks %s", folder, min(missing))
        else:
            weights = {name: _on_host(found[name]) for name in wanted}
            metrics = as_json(self._mean.watched(step))
            metadata = {"format": "pt", "step": str(step), "metrics": metrics}
            write(folder / means.IN_FOLDER, weights, metadata | self._mean.metadata(step))
        self._mean.reset()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
