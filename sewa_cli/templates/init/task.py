"""The model, the data and the loss of your run. The first three functions are required.

This file works as it stands for a toy problem; put your own model, data and loss in its place.
Whatever is printed here goes to stderr, so it never disturbs a pipeline.
"""

import torch
from torch import nn
from torch.nn import functional as F


def build_model():
    """The network whose checkpoints are averaged. Weights are loaded over it."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def selection_data():
    """Batches to choose the checkpoints with: any re-iterable, such as a DataLoader.

    Use data that the network was not trained on, 500 examples or more.
    """
    return _toy_batches(seed=1)


def loss(outputs, batch):
    """The mean over the batch, differentiable in outputs."""
    return F.cross_entropy(outputs, batch[1])


# ---- optional from here on -------------------------------------------------------------------


def predict(model, batch):
    """Return what `loss` gets. Leave it out for model(batch[0]) or model(**batch).logits."""
    return model(batch[0])


def heldout_data():
    """Batches for the report, which shows whether choosing really helped."""
    return _toy_batches(seed=2)


# def training_data():
#     """Batches to recompute BatchNorm statistics on. Left out: the selection data."""


# def groups(batch):
#     """A label for each example, if some depend on each other: the document it was cut from."""
#     return batch[2]


# def targets(batch):
#     """Classes, if `loss` is the mean of their cross-entropies: logits are made in pieces then."""
#     return batch[1]


# def metrics(model):
#     """Numbers for the report, from a model in eval mode: {"accuracy": 0.93}"""


# def score_parts():  # for --metric return: seeds of episodes, questions, files
#     return range(100)
# def score(model, part): return {"return": 1242.0}  # of one part


def _toy_batches(seed, size=256, count=4):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size * count, 8, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    return list(zip(inputs.split(size), labels.split(size), strict=True))
