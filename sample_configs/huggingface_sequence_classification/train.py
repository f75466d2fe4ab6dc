"""Train a tiny BERT to tell which standard module a docstring is from, with a plain loop.

Leaves model/ (config and tokenizer), data/unseen.csv and ckpts/ (bare weights) next to this file.
"""

import csv
import importlib
import inspect
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from sewa_cli.callbacks import save_weights

HERE = Path(__file__).parent
MODULES = ["argparse", "datetime", "decimal", "logging", "pathlib", "socket", "tarfile", "typing"]


def examples():
    """(sentence, module), each sentence once."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for _, thing in inspect.getmembers(module, callable):
            things = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
            for text in (inspect.getdoc(x) or "" for x in things if callable(x)):
                for line in text.splitlines():
                    if len(line.split()) > 3:
                        found.setdefault(line.strip(), name)
    return list(found.items())


def train_tokenizer(texts, words=1000):
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=words, special_tokens=special, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def main(steps=240, every=4):
    torch.manual_seed(0)
    rows = examples()
    draw = random.Random(0)
    draw.shuffle(rows)
    unseen, training = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    (HERE / "data").mkdir(exist_ok=True)
    with open(HERE / "data" / "unseen.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("sentence", "module"), *unseen])

    tokenizer = train_tokenizer(text for text, _ in training)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=48,
        id2label=dict(enumerate(MODULES)),
        label2id={name: i for i, name in enumerate(MODULES)},
    )
    tokenizer.save_pretrained(HERE / "model")
    config.save_pretrained(HERE / "model")
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        batch = draw.choices(training, k=16)
        inputs = tokenizer(
            [text for text, _ in batch],
            truncation=True,
            max_length=48,
            padding=True,
            return_tensors="pt",
        )
        labels = torch.tensor([MODULES.index(name) for _, name in batch])
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > steps // 2 and step % every == 0:
            save_weights(model, HERE / "ckpts", step, {"loss": loss})
    print(f"checkpoints in {HERE / 'ckpts'}, the last with a loss of {loss:.3f}")


if __name__ == "__main__":
    main()
