"""The mean of checkpoints as timm's avg_checkpoints.py makes it, on safetensors files.

    python benchmarks/timm_way.py OUTPUT FILES...

Whole state dicts, one after the other, summed in float64; no import of timm itself, which would
only make it start later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def timm_way(paths: Sequence[Path], output: Path) -> None:
    total: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for path in paths:
        for name, tensor in load_file(path).items():
            if name not in total:
                total[name] = tensor.clone().to(torch.float64)
                counts[name] = 1
            else:
                total[name] += tensor.to(torch.float64)
                counts[name] += 1
    for name, tensor in total.items():
        tensor.div_(counts[name])
    limits = torch.finfo(torch.float32)
    final = {n: t.clamp(limits.min, limits.max).to(torch.float32) for n, t in total.items()}
    save_file(final, output)


if __name__ == "__main__":
    timm_way([Path(path) for path in sys.argv[2:]], Path(sys.argv[1]))
