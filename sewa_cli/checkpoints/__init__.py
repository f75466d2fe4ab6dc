"""Finds checkpoints, orders them, checks their headers, reads tensors one by one.

Opening a checkpoint reads its header only. Tensor data stays on disk, memory-mapped where the
format allows it, until a tensor is asked for.

layout       which files and folders of a directory are checkpoints
opening      opens one of them, by its format:
  safetensors, pytorch, distributed, adapters
state        which tensors of a nested file are weights
checkpoint   what they all become
order        what their names say (step, best, last); sorted, narrowed down, all of one model
matching     maps their names to the model's
"""

from sewa_cli.checkpoints import pytorch
from sewa_cli.checkpoints.adapters import (
    check_fits,
    check_mergeable,
    check_same_product,
    pairs,
)
from sewa_cli.checkpoints.checkpoint import (
    WRITTEN_BY,
    Checkpoint,
    Kind,
    Reads,
    TensorInfo,
    paths_of,
    stamp_of,
)
from sewa_cli.checkpoints.layout import find, open_all
from sewa_cli.checkpoints.matching import PREFIXES, check_tied, match_names
from sewa_cli.checkpoints.opening import files_of, open_checkpoint
from sewa_cli.checkpoints.order import check_agreement, in_order, narrow
from sewa_cli.checkpoints.safetensors import SUFFIX

__all__ = [
    "PREFIXES",
    "SUFFIX",
    "WRITTEN_BY",
    "Checkpoint",
    "Kind",
    "Reads",
    "TensorInfo",
    "check_agreement",
    "check_fits",
    "check_mergeable",
    "check_same_product",
    "check_tied",
    "files_of",
    "find",
    "in_order",
    "match_names",
    "narrow",
    "open_all",
    "open_checkpoint",
    "pairs",
    "paths_of",
    "pytorch",
    "stamp_of",
]
