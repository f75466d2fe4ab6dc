"""Texts in AG News' csv format, as token ids: `"class","title","description"`, classes from 1."""

import csv
import json
import os
import zipfile
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy

DATA = Path(__file__).parent.parent / "data"
PAD, UNK = 0, 1  # the first two ids; words come after them, the most frequent first

SPACED = {mark: f" {mark} " for mark in "'.,()!?"}
DROPPED = dict.fromkeys(";:", " ")
TABLE = str.maketrans(SPACED | DROPPED)


def tokenize(text):
    """The tokens that torchtext's `basic_english` gives: lower case, punctuation split off."""
    return text.lower().replace('"', "").replace("<br />", " ").translate(TABLE).split()


def read_rows(path):
    """(class from 0, text) of each row; a line break, which AG News writes as `\\`, is a space."""
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.reader(file, strict=True)
        try:
            for row in table:
                where = f"{path}, line {table.line_num}"
                if len(row) != 3:
                    raise ValueError(f"{where}: {len(row)} columns, not class, title, description")
                if not row[0].isdecimal() or int(row[0]) < 1:
                    raise ValueError(f"{where}: the class must count from 1, found {row[0]!r}")
                yield int(row[0]) - 1, f"{row[1]} {row[2]}".replace("\\", " ")
        except csv.Error as error:
            raise ValueError(f"{path}, line {table.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text") from error


def encode(folder, vocabulary, length):
    """Both files as arrays: ids [rows, length], cut or padded, and classes [rows]; the words."""
    counts, parts = Counter(), {}
    for part in ("train", "test"):
        classes, texts = [], []
        for label, text in read_rows(folder / f"{part}.csv"):
            tokens = tokenize(text)
            classes.append(label)
            texts.append(tokens[:length])
            if part == "train":
                counts.update(tokens)
        if not texts:
            raise ValueError(f"{folder / part}.csv: has no rows")
        parts[part] = classes, texts
    most, found = (max(parts[part][0]) + 1 for part in ("train", "test"))
    if found > most:
        raise ValueError(f"{folder}: test.csv has class {found}, train.csv has 1 to {most} only")
    words = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    number = {word: n for n, word in enumerate(words, start=2)}

    arrays = {"words": numpy.array(words, dtype=str)}
    for part, (classes, texts) in parts.items():
        ids = numpy.full((len(texts), length), PAD, dtype=numpy.int32)
        for row, tokens in zip(ids, texts, strict=True):
            known = [number.get(token, UNK) for token in tokens] or [UNK]  # no text is all padding
            row[: len(known)] = known
        arrays[f"{part}_ids"], arrays[f"{part}_classes"] = ids, numpy.array(classes)
    return arrays


@lru_cache(maxsize=2)
def load(data="imdb_csv", vocabulary=10_000, length=64):
    """Return the arrays of `encode`, from a file next to the csv files if these are the same.

    data: a folder under sample_configs/data, or the path of one
    """
    if vocabulary < 3 or length < 1:
        raise ValueError(f"vocabulary: 3 or more, length: 1 or more; found {vocabulary}, {length}")
    folder = Path(data).expanduser()
    if len(folder.parts) == 1 and not folder.is_absolute():
        folder = DATA / folder
    files = [folder / "train.csv", folder / "test.csv"]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; `make data` at the root fetches IMDB")
    made_from = json.dumps(
        [vocabulary, length, [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]]
    )
    cache = folder / f"tokens-{vocabulary}-{length}.npz"
    arrays = read_cache(cache, made_from)
    if arrays is None:
        arrays = encode(folder, vocabulary, length)
        write_cache(cache, made_from, arrays)
    return arrays


def read_cache(path, made_from):
    """The arrays in `path`, or None if there are none, or they were made from something else."""
    try:
        with path.open("rb") as file, numpy.load(file) as stored:
            arrays = dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return arrays if str(arrays.pop("made_from", "")) == made_from else None


def write_cache(path, made_from, arrays):
    """Whole or not at all; without a word where the folder is not ours to write to."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            numpy.savez(file, made_from=numpy.array(made_from), **arrays)
        os.replace(temporary, path)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            os.unlink(temporary)
