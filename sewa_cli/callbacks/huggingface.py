"""A callback for transformers.Trainer.

Trainer(..., callbacks=[SaveForSewa("ckpts", every=50)])
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sewa_cli.callbacks.saving import Saver


class SaveForSewa(Saver, TrainerCallback):
    __doc__ = Saver.__doc__

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        del args, control
        self._begin(state.global_step, state.max_steps, state.is_world_process_zero)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        del args, control
        step = state.global_step
        if model is not None and self._moments.is_due(step - 1, step, state.max_steps):
            newest = {name: value for entry in state.log_history for name, value in entry.items()}
            newest.pop("step", None)  # of the log entry, not of the weights
            self._save(model, step, newest, state.is_world_process_zero)
