"""Digits with a small convolutional network and BatchNorm."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


def build_model(width=8):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def part(first, last, batch=200):
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(7))
    order = order[first:last]
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    return list(zip(images.split(batch), labels.split(batch), strict=True))


def training_data():
    return part(0, 797)


def selection_data():
    return part(797, 1297)


def heldout_data():
    return part(1297, 1797)


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def metrics(model):
    device = next(model.parameters()).device
    right = [model(x.to(device)).argmax(1).cpu() == y for x, y in heldout_data()]
    return {"accuracy": torch.cat(right).double().mean().item()}
