"""A callback for lightning.Trainer (or pytorch_lightning's).

Trainer(..., callbacks=[SaveForSewa("ckpts", every=50)])
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sewa_cli.callbacks.saving import (
    Folder,
    Moments,
    check_whole,
    refuse_another_run,
    save_weights,
    unwrap,
)

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # the same library under its older name
        from pytorch_lightning import Callback


class SaveForSewa(Callback):
    """Saves bare weights every `every` optimizer steps in the last part of the training.

    folder     of the files step-<n>.safetensors; made if it is not there
    every      optimizer steps between two files; the last step is saved as well
    start      the fraction of all steps before the first file
    dtype      of the files; None: as in the model
    overwrite  let a new run write into a folder that has such files already
    part       the attribute of the LightningModule that is saved ("net"); None: the whole module

    On rank 0 only. The newest logged metrics are kept in the metadata.
    """

    def __init__(
        self,
        folder: Folder,
        every: int = 50,
        start: float = 0.75,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
        part: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._moments = Moments(every, start)
        self._dtype = dtype
        self._overwrite = overwrite
        self._part = part
        self._total = 0.0
        self._before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._chosen(pl_module)
        self._total = float(trainer.estimated_stepping_batches)
        self._moments.check_total(self._total)
        self._before = trainer.global_step
        if trainer.is_global_zero:
            refuse_another_run(self.folder, trainer.global_step, self._overwrite)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # several batches make one step when gradients are accumulated, and one batch several
        # when it is optimized by hand
        before, step = self._before, trainer.global_step
        self._before = step
        if not self._moments.is_due(before, step, self._total):
            return
        model = self._chosen(pl_module)
        check_whole(unwrap(model))  # on every rank, so that all of them stop
        if trainer.is_global_zero:
            save_weights(model, self.folder, step, trainer.callback_metrics, self._dtype)

    def _chosen(self, module: LightningModule) -> nn.Module:
        chosen = module if self._part is None else getattr(module, self._part, None)
        if not isinstance(chosen, nn.Module):
            raise ValueError(f"part={self._part!r}: the LightningModule has no such part")
        return chosen
