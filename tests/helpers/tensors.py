"""Tensors of every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sewa_cli.dtypes import DTYPES, torch_dtype

WORDS = {torch_dtype(dtype): word for word, dtype in DTYPES.items()}


def change(path: Path | str, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit the tensors of a safetensors file."""
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def some_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bytes are a tensor of any dtype, but a bool must be 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.Size(shape).numel())
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)
