"""Loss and metrics of the ready-made tasks.

A batch is a dict: what the model takes, `targets` [n] or [n, T] (-100: none), and
`targets_per_row`, their mean number over *all* rows of the data. The loss of a batch is

    sum of the losses of its targets / (n · targets_per_row),

so that the mean over rows, which is what sewa takes, is the mean over all targets: rows with more
tokens weigh more, as in a perplexity, whatever the batches. A row's share does not depend on the
others of its batch, so that losses split into rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
Batch = dict[str, Any]


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy, or squared error for targets that are no classes; 0-d."""
    targets: Tensor = batch["targets"]
    targets_per_row: float = batch["targets_per_row"]
    return _total(outputs, targets) / (len(targets) * targets_per_row)


def _total(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs.float()  # a bf16 model's too, as transformers does
    if targets.is_floating_point():
        return F.mse_loss(outputs.reshape(targets.shape), targets, reduction="sum")
    return F.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def inputs_of(batch: Batch) -> Batch:
    """What of a batch is for the model."""
    return {key: x for key, x in batch.items() if key not in ("targets", "targets_per_row")}


def score(
    model: nn.Module,
    batches: Iterable[Batch],
    predict: Callable[[nn.Module, Batch], Tensor],
    language: bool,
) -> dict[str, float]:
    """Over all targets: accuracy; perplexity as well for language models; else mean |error|."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    right, count, regression = 0.0, 0, False
    with torch.no_grad():
        for batch in batches:
            moved = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()}
            outputs, targets = predict(model, moved), moved["targets"]
            if regression := targets.is_floating_point():
                right += float((outputs.float().reshape(targets.shape) - targets).abs().sum())
                count += targets.numel()
                continue
            counted = targets != IGNORED
            right += int((outputs.argmax(-1) == targets)[counted].sum())
            count += int(counted.sum())
            total += _total(outputs, targets).double().cpu()
    if regression:
        return {"mean_absolute_error": right / count}
    if language:
        return {"perplexity": float((total / count).exp()), "token_accuracy": right / count}
    return {"accuracy": right / count}
