"""The demo's task: 8×8 images of handwritten digits, a small network, cross-entropy.

The images are split once and for all: 797 to train on, 500 to choose the checkpoints with, 500
for the report.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

BATCH = 250


def split(part):
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = {"training": order[:797], "selection": order[797:1297], "heldout": order[1297:]}[part]
    return images[chosen], labels[chosen]


def batches(part):
    images, labels = split(part)
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def build_model():
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def selection_data():
    return batches("selection")


def heldout_data():
    return batches("heldout")


def training_data():
    return batches("training")


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def metrics(model):
    images, labels = split("heldout")
    device = next(model.parameters()).device
    right = model(images.to(device)).argmax(1).cpu() == labels
    return {"accuracy": right.double().mean().item()}
