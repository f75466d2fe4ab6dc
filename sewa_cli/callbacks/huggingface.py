"""A callback for transformers.Trainer.

Trainer(..., callbacks=[SaveForSewa("ckpts", every=50)])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sewa_cli.callbacks.saving import (
    Folder,
    Moments,
    check_whole,
    refuse_another_run,
    save_weights,
    unwrap,
)


class SaveForSewa(TrainerCallback):
    """Saves bare weights every `every` optimizer steps in the last part of the training.

    folder     of the files step-<n>.safetensors; made if it is not there
    every      optimizer steps between two files; the last step is saved as well
    start      the fraction of all steps before the first file
    dtype      of the files; None: as in the model
    overwrite  let a new run write into a folder that has such files already

    On rank 0 only. The newest logged numbers (loss, eval_loss …) are kept in the metadata.
    """

    def __init__(
        self,
        folder: Folder,
        every: int = 50,
        start: float = 0.75,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self._moments = Moments(every, start)
        self._dtype = dtype
        self._overwrite = overwrite

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        del args, control
        self._moments.check_total(state.max_steps)
        if state.is_world_process_zero:
            refuse_another_run(self.folder, state.global_step, self._overwrite)

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
        if model is None or not self._moments.is_due(step - 1, step, state.max_steps):
            return
        check_whole(unwrap(model))  # on every rank, so that all of them stop
        if state.is_world_process_zero:
            newest = {name: value for entry in state.log_history for name, value in entry.items()}
            newest.pop("step", None)  # of the log entry, not of the weights
            save_weights(model, self.folder, step, newest, self._dtype)
