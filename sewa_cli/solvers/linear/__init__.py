"""Outputs of any average, predicted from one forward pass for each checkpoint.

Around a base b (an average of the checkpoints) the network's outputs on the selection data are
taken as linear in the weights. With a step h towards each checkpoint,

    y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h        [O] numbers, all outputs of all batches
    f(Σ c_i w_i) ≈ Σ c_i y_i                             for Σ c_i = 1

so the y_i are themselves a trajectory, in output space, with the same two products: mixing, and
pulling a gradient back. The user's loss is only ever differentiated in the outputs.

scouting   where to linearise
building   the model run near every checkpoint, within the memory there is
cache      the y_i, and the user's loss of their mixtures, on all rows or on a sample of them
outputs    nests of tensors as one vector
"""

from sewa_cli.solvers.linear.build import TooLittleRoom, build
from sewa_cli.solvers.linear.scout import QUARTERS, Scouted, scout
from sewa_cli.solvers.linear.surrogate import Labels, Sample, Size, Surrogate

__all__ = [
    "QUARTERS",
    "Labels",
    "Sample",
    "Scouted",
    "Size",
    "Surrogate",
    "TooLittleRoom",
    "build",
    "scout",
]
