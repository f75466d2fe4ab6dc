"""PEFT adapters: their settings, their pairs of factors, and their names inside a PeftModel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sewa_cli.checkpoints.checkpoint import Checkpoint, TensorInfo, read_json
from sewa_cli.errors import CheckpointError, ConfigError, Unfinished
from sewa_cli.files import MIB
from sewa_cli.text import shown

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# what scales the product B·A and what it is added to; these must be the same in all
_PRODUCT = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "base_model_name_or_path",
)
_FACTORS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
# words in the names of a PeftModel that the adapter's file leaves out
_INSIDE = {"default", "modules_to_save"}
_OUTSIDE = "base_model.model."


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.exists():
        raise Unfinished(f"{path}: is missing; an adapter cannot be loaded without it")
    return read_json(path, 16 * MIB)


def check_same_product(checkpoints: Sequence[Checkpoint]) -> None:
    """Rank, scaling and base model must be the same in all."""
    adapters = [c for c in checkpoints if c.kind == "adapter"]
    if not adapters:
        return
    expected = read_config(adapters[0].folder)
    for checkpoint in adapters[1:]:
        found = read_config(checkpoint.folder)
        for key in _PRODUCT:
            if found.get(key) != expected.get(key):
                raise CheckpointError(
                    f"{checkpoint.folder / CONFIG}: {key}: expected {expected.get(key)!r:.100} "
                    f"as in {adapters[0].folder.name}, found {found.get(key)!r:.100}"
                )


def pairs(tensors: Mapping[str, TensorInfo]) -> list[tuple[str, str]]:
    """Return the names of A [r, …] and B [m, r, …], for every pair."""
    found = []
    for name in tensors:
        parts = name.split(".")
        for a, b in _FACTORS.items():
            if a in parts:
                other = ".".join(b if part == a else part for part in parts)
                if other not in tensors:
                    continue
                one, two = tensors[name], tensors[other]
                is_pair = one.is_float and two.is_float and min(len(one.shape), len(two.shape)) > 1
                if not is_pair or one.shape[0] != two.shape[1]:
                    what = f"{shown(name, 100)}, {one}, and {shown(other, 100)}, {two}"
                    raise CheckpointError(
                        f"{what}: do not form a product of LoRA factors; save the adapter again"
                    )
                found.append((name, other))
    return found


def check_mergeable(checkpoint: Checkpoint) -> None:
    """`lora: merged` needs plain pairs of factors."""
    if checkpoint.kind != "adapter":
        raise ConfigError(f"lora: {checkpoint.path} is not a PEFT adapter; leave it out")
    config = read_config(checkpoint.folder)
    if config.get("use_dora"):
        raise ConfigError(
            "lora: merged: DoRA's magnitudes are not part of the product; use --set lora=factors"
        )
    if not pairs(checkpoint.tensors):
        raise ConfigError(
            f"lora: merged: {checkpoint.path} has no pairs of LoRA factors; use --set lora=factors"
        )


def check_fits(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Return the names of the model that belong to the adapter; refuse a model that has none."""
    found = set(names_in_model(checkpoint, names))
    if all(_INSIDE.isdisjoint(name.split(".")) for name in found):
        raise CheckpointError(
            f"{checkpoint.path}: is a PEFT adapter, and the task's model has none; return "
            "get_peft_model(base, config) or PeftModel.from_pretrained(base, folder) from "
            "build_model, or use `task: huggingface`"
        )
    return found


def names_in_model(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, str]:
    """Name in a PeftModel → name in the adapter's file, for the adapter's own tensors.

    PEFT inserts the adapter's name: lora_A.default.weight is lora_A.weight in the file. Embeddings
    that it saves along, as they are targets or were resized, have the same name in both.
    """
    plain = {name.removeprefix(_OUTSIDE): name for name in checkpoint.tensors}
    found = {}
    for name in names:
        parts = name.removeprefix(_OUTSIDE).split(".")
        short = ".".join(part for part in parts if part not in _INSIDE)
        if short in plain:
            found[name] = plain[short]
    return found
