"""Interval means: checkpoints that are the mean of the weights over several steps."""

from __future__ import annotations

from typing import Final

STEPS: Final = "sewa_mean_steps"  # metadata key: the number of steps a mean is of
FROM: Final = "sewa_mean_from"  # and the first of them
SUFFIX: Final = ".mean.safetensors"  # step-100.mean.safetensors stands next to step-100.safetensors
IN_FOLDER: Final = "mean.safetensors"  # in a folder that is a checkpoint
