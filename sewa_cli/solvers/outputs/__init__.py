"""Predict the outputs, and so the loss, of any average of the checkpoints.

Around a base b, itself an average, the model's outputs on the examples are taken as linear in the
weights. With a step h towards each checkpoint,

    d_i = (f(b + h (w_i − b)) − f(b)) / h           [O] numbers, all outputs of all examples
    f(Σ c_i w_i) ≈ f(b) + Σ (c_i − b_i) d_i         for Σ c_i = 1, b_i the coefficients of b

takes one forward pass for each checkpoint. Mixtures and gradients are then products with a matrix
[k, O], and the user's loss is only ever differentiated in the outputs.

survey       reads the checkpoints: baselines and their losses, the base, the predictions
examples     which examples take part, within memory and time
predictions  the matrix, and losses and gradients of mixtures by example
whole        all outputs of the model, and the user's own loss of them
digest       a few of many classes' logits for each target, and their cross-entropy
"""
