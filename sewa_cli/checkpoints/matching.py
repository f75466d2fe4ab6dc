"""Maps the names in a checkpoint to the model's: wrapper prefixes, tied weights, adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sewa_cli.checkpoints.adapters import names_in_model
from sewa_cli.checkpoints.checkpoint import Checkpoint
from sewa_cli.errors import CheckpointError
from sewa_cli.text import few

if TYPE_CHECKING:
    from torch import Tensor

_ONE_ALONE = "; it has several state dicts: {}; --state-key KEY takes one alone"
# of DistributedDataParallel, torch.compile and many trainers, before every name
PREFIXES = ("module.", "_orig_mod.", "model.")


def match_names(
    checkpoint: Checkpoint,
    tied: Sequence[tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    floats: Iterable[str],
) -> dict[str, str]:
    """Map every tensor's name in the model to its name in the checkpoint, tied ones once.

    `tied`: the model's names, those of one tensor grouped; `shapes`: of the model's tensors.
    Of tied names, the first that the checkpoint has is kept; `with_tied` adds the others.
    """
    sources, extra = _sources(checkpoint, tied)
    missing = [names[0] for names in tied if not any(name in sources for name in names)]
    faults = {"missing from the checkpoint": missing, "not in the model": extra}
    if lines := [f"{what}: {few(names)}" for what, names in faults.items() if names]:
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model that build_model() returns: "
            + "; ".join(lines)
            + (_ONE_ALONE.format(", ".join(checkpoint.groups)) if checkpoint.groups else "")
        )
    kept = {next(name for name in names if name in sources): names[0] for names in tied}
    float_names = set(floats)
    for name, first in kept.items():
        info = checkpoint.tensors[sources[name]]
        kind = "a floating-point" if first in float_names else "an integer"
        if info.shape != tuple(shapes[first]) or info.is_float != (first in float_names):
            raise CheckpointError(
                f"{checkpoint.path}: {sources[name]}: expected {kind} tensor of shape "
                f"{list(shapes[first])} as in the model, found {info}"
            )
    return {name: sources[name] for name in kept}


def _sources(
    checkpoint: Checkpoint, tied: Sequence[tuple[str, ...]]
) -> tuple[dict[str, str], list[str]]:
    """Model name → the checkpoint's name for it; and names in the checkpoint that are left over."""
    if checkpoint.kind == "adapter":
        fitting = names_in_model(checkpoint, [name for names in tied for name in names])
        return fitting, [name for name in checkpoint.tensors if name not in fitting.values()]
    by_variant: dict[str, str] = {}
    stripped = [(name, list(_variants(name))) for names in tied for name in names]
    for depth in range(max(len(variants) for _, variants in stripped)):
        for name, variants in stripped:  # the full name first, then without one prefix, and so on
            if depth < len(variants):
                by_variant.setdefault(variants[depth], name)
    sources: dict[str, str] = {}
    extra: list[str] = []
    for found in checkpoint.tensors:
        target = next((by_variant[v] for v in _variants(found) if v in by_variant), None)
        if target is None or target in sources:
            extra.append(found)
        else:
            sources[target] = found
    return sources, extra


def with_tied(
    names: Mapping[str, str], checkpoint: Checkpoint, tied: Sequence[tuple[str, ...]]
) -> dict[str, str]:
    """Add the names of tied tensors that the checkpoint has too: the average loads alike."""
    sources, _ = _sources(checkpoint, tied)
    twins = [name for group in tied for name in group if name in sources]
    return {**names, **{name: sources[name] for name in twins}}


def check_tied(checkpoint: Checkpoint, tied: Sequence[tuple[str, ...]]) -> None:
    """All names of one tensor of the model must hold the same bytes: only one is averaged."""
    sources, _ = _sources(checkpoint, tied)
    for names in tied:
        present = [sources[name] for name in names if name in sources]
        for other in present[1:]:
            one, two = checkpoint.read(present[0]), checkpoint.read(other)
            alike = one.dtype == two.dtype and one.shape == two.shape
            if not (alike and bool((_raw(one) == _raw(two)).all())):
                raise CheckpointError(
                    f"{checkpoint.path}: {present[0]} and {other} are one tensor in the model, "
                    "but differ in the file; untie them in build_model()"
                )


def _raw(tensor: Tensor) -> Any:
    """Its bytes, so that a NaN equals itself: NaNs are reported later."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _variants(name: str) -> Iterator[str]:
    """The name, then the name without one, two … leading wrapper prefixes."""
    yield name
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
        yield name
    if "._orig_mod." in name:  # of a compiled submodule
        yield name.replace("._orig_mod.", ".")
