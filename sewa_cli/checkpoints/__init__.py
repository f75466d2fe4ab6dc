"""Finds checkpoints, orders them, checks their headers, reads tensors one by one.

Opening a checkpoint reads its header only. Tensor data stays on disk, memory-mapped where the
format allows it, until a tensor is asked for.

layout       which files and folders of a directory are checkpoints
toolkits     whose checkpoints are found among other files, as a table
opening      opens one of them, by its format:
  safetensors, pytorch (also in archives), distributed, adapters, modules (several files)
inert        what the objects in a pickle become
state        which tensors of a nested file are weights
checkpoint   what they all become
order        what their names say (step, best, last); sorted, narrowed down, all of one model
matching     maps their names to the model's
"""

from sewa_cli.checkpoints import pytorch as pytorch
from sewa_cli.checkpoints.adapters import check_fits as check_fits
from sewa_cli.checkpoints.adapters import check_mergeable as check_mergeable
from sewa_cli.checkpoints.adapters import check_same_product as check_same_product
from sewa_cli.checkpoints.adapters import pairs as pairs
from sewa_cli.checkpoints.checkpoint import WRITTEN_BY as WRITTEN_BY
from sewa_cli.checkpoints.checkpoint import Checkpoint as Checkpoint
from sewa_cli.checkpoints.checkpoint import Kind as Kind
from sewa_cli.checkpoints.checkpoint import Reads as Reads
from sewa_cli.checkpoints.checkpoint import TensorInfo as TensorInfo
from sewa_cli.checkpoints.checkpoint import paths_of as paths_of
from sewa_cli.checkpoints.checkpoint import stamp_of as stamp_of
from sewa_cli.checkpoints.layout import find as find
from sewa_cli.checkpoints.layout import open_all as open_all
from sewa_cli.checkpoints.matching import PREFIXES as PREFIXES
from sewa_cli.checkpoints.matching import check_tied as check_tied
from sewa_cli.checkpoints.matching import match_names as match_names
from sewa_cli.checkpoints.matching import with_tied as with_tied
from sewa_cli.checkpoints.opening import files_of as files_of
from sewa_cli.checkpoints.opening import open_checkpoint as open_checkpoint
from sewa_cli.checkpoints.order import check_agreement as check_agreement
from sewa_cli.checkpoints.order import in_order as in_order
from sewa_cli.checkpoints.order import narrow as narrow
from sewa_cli.checkpoints.safetensors import SUFFIX as SUFFIX
