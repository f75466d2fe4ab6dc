"""Averages of LoRA adapters: factors apart, with the gap told, or the products, re-factored.

ΔW = scaling · B·A, and the mean of products is not the product of means. `factors` averages A and B
apart, which every tool does and which loads like any average. `merged` averages the products and
finds the closest adapter of the same rank, pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from sewa_cli.checkpoints import Checkpoint, check_mergeable, pairs
from sewa_cli.config import Config
from sewa_cli.dtypes import as_array, torch_dtype
from sewa_cli.errors import CheckpointError, ConfigError
from sewa_cli.output.average import Averaged
from sewa_cli.report.shared import Lora

if TYPE_CHECKING:
    from torch import Tensor


def check_lora(config: Config, newest: Checkpoint) -> None:
    """Refuse early what cannot be merged."""
    if config.lora == "merged":
        check_mergeable(newest)


def average_factors(averaged: Averaged, mode: Literal["factors", "merged"]) -> Lora | None:
    """Re-factor the average of products into it (`merged`), or only measure what that would gain.

    None: these are no LoRA adapters.
    """
    if averaged.sources[0].kind != "adapter":
        return None
    from sewa_cli.output.lowrank import (  # torch, of which other averages know nothing
        factor_gap,
        refactor,
    )

    merges = mode == "merged"
    errors = []
    for (a, b), As, Bs in _factors(averaged):
        if merges:
            B, A, error = refactor(Bs, As, averaged.coefficients)
            averaged.replaced[b] = as_array(B.to(torch_dtype(averaged.dtype_of(b))))
            averaged.replaced[a] = as_array(A.to(torch_dtype(averaged.dtype_of(a))))
        else:
            error = factor_gap(Bs, As, averaged.coefficients)
        errors.append(error)
    if not errors:
        return None
    averaged.lora = mode
    found = Lora(mode=mode, pairs=len(errors), largest=max(errors), mean=sum(errors) / len(errors))
    averaged.facts["LoRA"] = describe(found)
    return found


def describe(lora: Lora) -> str:
    apart = f"{lora.largest:.2%} at most, {lora.mean:.2%} on average, over {lora.pairs} pairs"
    if lora.mode == "merged":
        return f"products B·A averaged and re-factored to the same rank; error {apart}"
    return f"A and B averaged apart; the product is off the mean of products by {apart}"


def warning(lora: Lora | None) -> str | None:
    """`factors` is a choice that a user should know of."""
    if lora is None or lora.mode == "merged" or lora.largest < 1e-6:
        return None
    return f"{describe(lora)}; --lora merged (of select and average) averages the products"


def _factors(averaged: Averaged) -> Iterator[tuple[tuple[str, str], list[Tensor], list[Tensor]]]:
    """Output names of each pair, and its factors in every source; one pair at a time."""
    written = {source: name for name, source in averaged.names.items()}
    for a, b in pairs(averaged.sources[0].tensors):
        if a not in written or b not in written:
            raise ConfigError(f"--lora: {a} and {b} are not both in the model")
        As = [_finite(checkpoint, a) for checkpoint in averaged.sources]
        Bs = [_finite(checkpoint, b) for checkpoint in averaged.sources]
        yield (written[a], written[b]), As, Bs


def _finite(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.read(name)
    if not tensor.isfinite().all():
        raise CheckpointError(f"{checkpoint.path}: {name} holds NaN or Inf; leave it out")
    return tensor
