"""CIFAR with a small residual network, after the paper's: the images, the network, the accuracy.

The first four fifths of the training images train the network, the last fifth selects, the test
images are held out.
"""

from functools import cache

import torch
from cifar import count_classes, load
from torch import nn
from torch.nn import functional as F

from sewa_cli.errors import TaskError

CIFAR = "cifar-10-batches-bin"  # a folder in ../data, or a path


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A convolution to 16 × 16 pixels, the blocks, the average over the pixels, a linear layer.

    The second and the third block halve the pixels' grid and double the channels.
    """

    def __init__(self, blocks, width, classes):
        super().__init__()
        self.stem = convolution(3, width, 3, 2)
        channels = [width * 2 ** min(number, 2) for number in range(blocks)]
        self.blocks = nn.Sequential(
            *(
                Block(channels[max(number - 1, 0)], outputs, 2 if number in (1, 2) else 1)
                for number, outputs in enumerate(channels)
            )
        )
        self.linear = nn.Linear(channels[-1], classes)

    def forward(self, images):
        x = images.contiguous(memory_format=torch.channels_last)  # a third faster on a CPU
        return self.linear(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def convolution(inputs, outputs, size, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def build_model(data=CIFAR, blocks=3, width=16, heldout=5000):
    if blocks < 1 or width < 1:
        raise TaskError(f"blocks and width must be 1 or more, found {blocks} and {width}")
    model = ResidualNetwork(blocks, width, count_classes(data))
    model.heldout = (data, heldout)  # for metrics(), which is given the model alone
    return model


def training_part(data):
    """All training images, and how many of them train: the first four fifths."""
    part = load(data, "training")
    return part, len(part) * 4 // 5


def training_data(data=CIFAR, statistics=2000):
    """Return examples for BatchNorm, whose statistics are made for each average: not all."""
    part, edge = training_part(data)
    return batches("statistics", statistics, part, 0, edge)


def selection_data(data=CIFAR, selection=1000, selection_from="fresh", selection_skip=0):
    if selection_skip < 0:
        raise TaskError(f"args.selection_skip: must be 0 or more images, found {selection_skip}")
    part, edge = training_part(data)
    if selection_from == "fresh":
        return batches("selection", selection, part, edge + selection_skip, len(part))
    if selection_from == "training":
        return batches("selection", selection, part, selection_skip, edge)
    raise TaskError(f"args.selection_from: must be fresh or training, found {selection_from!r}")


@cache  # metrics() asks for them at each average
def heldout_data(data=CIFAR, heldout=5000):
    part = load(data, "test")
    return batches("heldout", heldout, part, 0, len(part))


def batches(name, count, part, first, last, size=250):
    """The first `count` images of part[first:last] with their labels; `name` is what asks."""
    if not 1 <= count <= last - first:
        raise TaskError(f"args.{name}: must be 1 to {last - first} images, found {count}")
    images, labels = map(torch.from_numpy, part.take(first, first + count))
    return list(zip(as_inputs(images).split(size), labels.split(size), strict=True))


def as_inputs(images):
    """Bytes as numbers around 0."""
    return images.float() / 64 - 2


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def metrics(model):
    device = next(model.parameters()).device
    pairs = heldout_data(*model.heldout)
    right = [model(images.to(device)).argmax(1).cpu() == labels for images, labels in pairs]
    return {"accuracy": torch.cat(right).double().mean().item()}


# to choose by accuracy: a part is a few rows


def score_parts(data=CIFAR, selection=1000, selection_from="fresh", selection_skip=0):
    return pieces(selection_data(data, selection, selection_from, selection_skip))


def heldout_parts(data=CIFAR, heldout=5000):
    return pieces(heldout_data(data, heldout))


def pieces(batches, size=25):
    return [part for batch in batches for part in zip(*(x.split(size) for x in batch), strict=True)]


def score(model, part):
    inputs, labels = part
    return {"accuracy": (model(inputs).argmax(1) == labels).double().mean().item()}
