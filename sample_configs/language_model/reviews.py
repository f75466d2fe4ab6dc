"""IMDB's reviews as a language model's text: a tokenizer, rows to train on, rows to judge with.

Documents are split, not rows: four fifths of train.csv are trained on, the rest of it is for
choosing, and test.csv is held out. The tokenizer sees the first part only.
"""

import csv
import json
import os

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LENGTH = 128  # tokens of a row
PAD, START = "<pad>", "<s>"


def read(path):
    """The texts of `"class","title","text"`, a row each."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `make data` at the root fetches IMDB")
    with path.open(newline="", encoding="utf-8") as file:
        return [f"{title} {text}".strip() for _, title, text in csv.reader(file, strict=True)]


def documents(folder):
    """Texts by part; no text is in two, as `make data` has dropped what is there twice."""
    texts = read(folder / "train.csv")
    cut = len(texts) * 4 // 5
    return {"training": texts[:cut], "selection": texts[cut:], "heldout": read(folder / "test.csv")}


def train_tokenizer(texts, words):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=[PAD, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    start = {"special_tokens": [(START, inner.token_to_id(START))]}
    inner.post_processor = processors.TemplateProcessing(single=f"{START} $A", **start)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, bos_token=START)


def beginnings(tokenizer, texts, rows):
    """The first LENGTH tokens of as many texts as have them, cut between two words.

    One row a document: rows of the same one are alike, and would make intervals too narrow.
    """
    found = []
    for text in texts:
        code = tokenizer(text, return_offsets_mapping=True)
        words = tokenizer.convert_ids_to_tokens(code["input_ids"])
        if len(words) > LENGTH:
            last = max(n for n in range(LENGTH + 1) if words[n].startswith("Ġ"))
            found.append(text[: code["offset_mapping"][last][0]].rstrip())
        if len(found) == rows:
            return found
    raise ValueError(f"{len(found)} texts have {LENGTH} tokens, {rows} are asked for")


def prepare(folder, out, words, selection, heldout):
    """out/: the tokenizer, selection.jsonl, heldout.jsonl and training.npy [rows, LENGTH], once."""
    made = out / "training.npy"
    if not made.exists():
        out.mkdir(parents=True, exist_ok=True)
        parts = documents(folder)
        tokenizer = train_tokenizer(parts["training"], words)
        tokenizer.save_pretrained(out / "tokenizer")
        for part, rows in (("selection", selection), ("heldout", heldout)):
            texts = beginnings(tokenizer, parts[part], rows)
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (out / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        stream = numpy.concatenate([*map(numpy.array, tokenizer(parts["training"])["input_ids"])])
        rows = stream[: len(stream) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(numpy.int32)
        temporary = out / f".{os.getpid()}.npy"
        numpy.save(temporary, rows)
        os.replace(temporary, made)  # last of all: it says that the rest is there
    return PreTrainedTokenizerFast.from_pretrained(out / "tokenizer"), numpy.load(made)
