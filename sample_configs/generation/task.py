"""A small encoder and decoder that reads numbers aloud, scored by the text that it generates.

The loss sees one word at a time, with the right words before it; BLEU and exact match see whole
answers, with the model's own words before each.
"""

from functools import cache

import sacrebleu
import torch
from torch import nn
from torch.nn import functional as F
from words import MONTHS, number, ordinal, pairs

LETTERS = " 0123456789,./:£"
NUMBERS = {word for n in range(100) for word in f"{number(n)} {ordinal(n)}".split()}
OTHERS = {
    *("and", "hundred", "thousand", "the", "of", "oh", "quarter", "half", "past", "to", "in"),
    *("morning", "afternoon", "evening", "pound", "pounds"),
}
WORDS = ["", ".", *sorted({*NUMBERS, *OTHERS, *MONTHS})]
START, END = 0, 1  # of an answer: the empty word, which also fills up, and the full stop
LONGEST = 20  # words
WIDEST = 10  # letters: always as many, so that an answer does not depend on its neighbours


class Reader(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.words = nn.Embedding(len(WORDS), width)
        self.places = nn.Embedding(LONGEST + 2, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        encoder = nn.TransformerEncoderLayer(width, 4, 4 * width, **options)
        decoder = nn.TransformerDecoderLayer(width, 4, 4 * width, **options)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        self.last = nn.Linear(width, len(WORDS))

    def encode(self, written):
        return self.encoder(self.letters(written) + self._places(written))

    def decode(self, encoded, read):
        """Logits of the word that follows each."""
        mask = nn.Transformer.generate_square_subsequent_mask(read.shape[1], read.device)
        known = self.words(read) + self._places(read)
        return self.last(self.decoder(known, encoded, tgt_mask=mask, tgt_is_causal=True))

    def forward(self, written, read):
        return self.decode(self.encode(written), read)

    def _places(self, tokens):
        return self.places(torch.arange(tokens.shape[1], device=tokens.device))


def build_model(width=64, layers=2):
    return Reader(width, layers)


@cache
def rows(part):
    return pairs()[part]


def tensors(some):
    """written [n, WIDEST], and read [n, T], filled up with zeros."""
    written = [[LETTERS.index(letter) for letter in source.ljust(WIDEST)] for source, _ in some]
    read = [[WORDS.index(word) for word in target.split()] + [END] for _, target in some]
    return [nn.utils.rnn.pad_sequence([*map(torch.tensor, x)], True) for x in (written, read)]


def batches(part):
    return [tensors(rows(part)[i : i + 100]) for i in range(0, len(rows(part)), 100)]


def selection_data():
    return batches("selection")


def heldout_data():
    return batches("heldout")


def predict(model, batch):
    written, read = batch
    return model(written, F.pad(read, (1, -1), value=START))


def loss(outputs, batch):
    return F.cross_entropy(
        outputs.flatten(0, 1), batch[1].flatten()
    )  # padding too: it ends answers


# to choose by what is generated: a part is a handful of answers


def score_parts(answers=10):
    return parts("selection", answers)


def heldout_parts(answers=10):
    return parts("heldout", answers)


def parts(part, answers):
    return [rows(part)[i : i + answers] for i in range(0, len(rows(part)), answers)]


def scores(model, parts):
    """All answers are generated together, which is faster, and scored part by part."""
    found = iter(generate(model, tensors([pair for part in parts for pair in part])[0]))
    return [compared([next(found) for _ in part], [target for _, target in part]) for part in parts]


def compared(found, wanted):
    return {
        "bleu": sacrebleu.corpus_bleu(found, [wanted]).score,
        "chrf": sacrebleu.corpus_chrf(found, [wanted]).score,
        "exact_match": sum(map(str.__eq__, found, wanted)) / len(wanted),
    }


@torch.inference_mode()
def generate(model, written):
    """The likeliest word, and then the likeliest after that, until all have come to an end."""
    device = model.last.weight.device
    encoded = model.encode(written.to(device))
    read = torch.full((len(written), 1), START, device=device)
    while read.shape[1] <= LONGEST and not (read == END).any(1).all():
        following = model.decode(encoded, read)[:, -1].argmax(-1, keepdim=True)
        read = torch.cat([read, following], dim=1)
    return [answer(tokens) for tokens in read[:, 1:].tolist()]


def answer(tokens):
    words = tokens[: tokens.index(END)] if END in tokens else tokens
    return " ".join(WORDS[word] for word in words)
