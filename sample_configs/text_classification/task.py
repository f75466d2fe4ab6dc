"""Texts of a few classes with a small transformer: the network of the paper's AG News setting."""

from functools import partial

import texts
import torch
from torch import nn
from torch.nn import functional as F

# nn.TransformerEncoderLayer's shortcut for eval mode is slower on a CPU than the ordinary path, by
# half or more, and rounds otherwise than training does
torch.backends.mha.set_fastpath_enabled(False)


class TextClassifier(nn.Module):
    """Two embeddings (of tokens and of places), encoder layers, the mean of a text, linear."""

    def __init__(self, words, classes, length, layers, width, heads, dropout):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True)
            for _ in range(layers)
        )
        for layer in self.layers:
            layer.self_attn.dropout = 0.0  # on a CPU it doubles the time of a step
        self.linear = nn.Linear(width, classes)

    def forward(self, ids):
        padding = ids == texts.PAD
        hidden = self.tokens(ids) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        real = (~padding).unsqueeze(2)
        return self.linear((hidden * real).sum(1) / real.sum(1))


def build_model(
    data="imdb_csv",
    vocabulary=10_000,
    length=64,
    layers=2,
    width=32,
    heads=2,
    dropout=0.1,
    heldout=2000,
):
    arrays = texts.load(data, vocabulary, length)
    classes = int(arrays["train_classes"].max()) + 1
    words = len(arrays["words"]) + 2
    model = TextClassifier(words, classes, length, layers, width, heads, dropout)
    # metrics() gets the model alone
    model.heldout_data = partial(heldout_data, data, vocabulary, length, heldout)
    return model


def batches(arrays, part, rows, batch=250):
    ids = torch.from_numpy(arrays[f"{part}_ids"][rows]).long()
    classes = torch.from_numpy(arrays[f"{part}_classes"][rows])
    return list(zip(ids.split(batch), classes.split(batch), strict=True))


def check_rows(name, asked, there):
    if not 1 <= asked <= there:
        raise ValueError(f"{name}: from 1 to {there} rows, found {asked}")


def trained_on(arrays):
    """How many rows of train.csv, from the first, the network is trained on: four fifths."""
    return len(arrays["train_classes"]) * 4 // 5


def training_data(data="imdb_csv", vocabulary=10_000, length=64):
    arrays = texts.load(data, vocabulary, length)
    return batches(arrays, "train", slice(trained_on(arrays)))


def selection_data(
    data="imdb_csv",
    vocabulary=10_000,
    length=64,
    selection=1000,
    selection_from="fresh",
    selection_skip=0,
):
    """Rows of train.csv: the last, which no training sees, or some of those trained on."""
    if selection_from not in ("fresh", "training"):
        raise ValueError(f"selection_from: fresh or training, found {selection_from!r}")
    if selection_skip < 0:
        raise ValueError(f"selection_skip: 0 rows or more, found {selection_skip}")
    arrays = texts.load(data, vocabulary, length)
    rows, cut = len(arrays["train_classes"]), trained_on(arrays)
    first, last = (cut, rows) if selection_from == "fresh" else (0, cut)
    last -= selection_skip
    check_rows("selection", selection, last - first)
    return batches(arrays, "train", slice(last - selection, last))


def heldout_data(data="imdb_csv", vocabulary=10_000, length=64, heldout=2000):
    arrays = texts.load(data, vocabulary, length)
    check_rows("heldout", heldout, len(arrays["test_classes"]))
    return batches(arrays, "test", slice(heldout))


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def metrics(model):
    device = next(model.parameters()).device
    right = [model(ids.to(device)).argmax(1).cpu() == y for ids, y in model.heldout_data()]
    return {"accuracy": torch.cat(right).double().mean().item()}


# to choose by accuracy: a part is a few rows


def score_parts(
    data="imdb_csv",
    vocabulary=10_000,
    length=64,
    selection=1000,
    selection_from="fresh",
    selection_skip=0,
):
    return pieces(
        selection_data(data, vocabulary, length, selection, selection_from, selection_skip)
    )


def heldout_parts(data="imdb_csv", vocabulary=10_000, length=64, heldout=2000):
    return pieces(heldout_data(data, vocabulary, length, heldout))


def pieces(batches, size=25):
    return [part for batch in batches for part in zip(*(x.split(size) for x in batch), strict=True)]


def score(model, part):
    inputs, labels = part
    return {"accuracy": (model(inputs).argmax(1) == labels).double().mean().item()}
