"""A callback for lightning.Trainer (or pytorch_lightning's).

Trainer(..., callbacks=[SaveForSewa("ckpts", every=50)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from sewa_cli.callbacks.saving import Folder, Saver
from sewa_cli.callbacks.watch import Loss

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # the same library under its older name
        from pytorch_lightning import Callback


class SaveForSewa(Saver, Callback):
    __doc__ = f"""{Saver.__doc__}
    part       the attribute of the LightningModule that is saved ("net"); None: the whole module
    """

    def __init__(
        self,
        folder: Folder,
        every: int = 50,
        start: float = 0.75,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
        part: str | None = None,
        means: int | Literal["cpu"] = False,
        watch: Loss | None = None,
    ) -> None:
        super().__init__(folder, every, start, dtype, overwrite, means, watch)
        self._part = part
        self._total = 0.0
        self._before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._total = float(trainer.estimated_stepping_batches)
        self._before = trainer.global_step
        model = self._chosen(pl_module)
        self._begin(model, self._before, self._total, trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # several batches make one step when gradients are accumulated, and one batch makes
        # several when the module optimizes manually
        before, self._before = self._before, trainer.global_step
        span = before, self._before, self._total
        metrics, writes = (lambda: trainer.callback_metrics), trainer.is_global_zero
        self._after(self._chosen(pl_module), *span, metrics, writes)

    def _chosen(self, module: LightningModule) -> nn.Module:
        chosen = module if self._part is None else getattr(module, self._part, None)
        if not isinstance(chosen, nn.Module):
            raise ValueError(f"part={self._part!r}: is not a module of the LightningModule")
        return chosen
