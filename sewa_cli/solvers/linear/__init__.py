"""The linear solver: masks chosen among predicted outputs, with forward passes only.

Around a base b (an average of the checkpoints) the network's outputs on the selection data are
taken as linear in the weights. With a step h towards each checkpoint,

    y_i = f(b) + (f(b + h (w_i − b)) − f(b)) / h        [O] numbers, all outputs of all batches
    f(Σ c_i w_i) ≈ Σ c_i y_i                             for Σ c_i = 1

so the y_i are themselves a trajectory, in output space, with the same two products: mixing, and
pulling a gradient back. The user's loss is only ever differentiated in the outputs.

rounds     the solver: linearise, choose, linearise there, choose again
survey     checkpoints stream past the model: where to linearise, outputs, true losses
build      the model run near every checkpoint, within the memory there is
outputs    what such a vector [O] means, and its loss
whole      all outputs, and the user's own loss
digest     of many classes' logits, a few numbers for each target, and their cross-entropy
surrogate  the y_i, and the loss of their mixtures, on all rows or on a sample of them
relax      the mask problem among the y_i
cost       what all of it takes, before any work
"""
