"""Examples of tokens, padded and put into batches; and those of classification."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.batches import IGNORED, TEXTS, Batch
from sewa_cli.task.ready.tables import Labels, Row


@dataclass(frozen=True)
class Example:
    """One row, tokenised: what the model takes, and a target for each token, or one for all."""

    inputs: dict[str, list[int]]
    targets: list[int] | float | int
    is_cut: bool = False  # tokens were lost
    text: int | None = None  # of language models: a label of the text that the row was cut from

    @property
    def number_of_targets(self) -> int:
        if not isinstance(self.targets, list):
            return 1
        return sum(target != IGNORED for target in self.targets)


@dataclass(frozen=True)
class TextReader:
    """Tokenises rows; `tokenizer` is one of transformers', `padding` its padding token's number."""

    tokenizer: Any
    max_length: int
    padding: int

    def classified(
        self, rows: Sequence[Row], columns: Sequence[str], target: Callable[[Row], float | int]
    ) -> list[Example]:
        """One target for each text, or pair of texts."""
        texts = ([as_text(row, column) for row in rows] for column in columns)
        encoded, cut = self._encode(*texts)
        return [
            Example(inputs, target(row), is_cut)
            for row, inputs, is_cut in zip(rows, _split(encoded), cut, strict=True)
        ]

    def tagged(self, rows: Sequence[Row], words: str, tags: str, labels: Labels) -> list[Example]:
        """A tag for each word: the target of its first token; its other tokens have none."""
        if not self.tokenizer.is_fast:
            raise TaskError("kind: token-classification: needs a fast tokenizer (tokenizer.json)")
        numbers = [_tags(row, words, tags, labels) for row in rows]
        texts = [[_checked(row, words, word) for word in row.get(words)] for row in rows]
        encoded, cut = self._encode(texts, is_split_into_words=True)
        examples = []
        for i, inputs in enumerate(_split(encoded)):
            places = encoded.word_ids(i)
            targets = [
                numbers[i][word] if word is not None and word != before else IGNORED
                for before, word in zip([None, *places], places, strict=False)
            ]
            examples.append(Example(inputs, targets, cut[i]))
        return examples

    def transcribed(self, rows: Sequence[Row], column: str, start: int) -> list[Example]:
        """The number of tokens to write after the start token; each is predicted."""
        encoded, cut = self._encode(text_target=[as_text(row, column) for row in rows])
        found = []
        for ids, is_cut in zip(encoded["input_ids"], cut, strict=True):
            wanted = ids[1:] if ids[:1] == [start] else ids
            inputs = {"decoder_input_ids": [start, *wanted[:-1]]}
            found.append(Example(inputs, wanted, is_cut=is_cut, text=label_of(wanted)))
        return found

    def translated(self, rows: Sequence[Row], columns: Sequence[str], start: int) -> list[Example]:
        """A text to read and one to write, of which every token is predicted."""
        texts = [[as_text(row, column) for row in rows] for column in columns]
        encoded, cut = self._encode(texts[0])
        wanted, cut_too = self._encode(text_target=texts[1])
        return [
            Example(
                {**inputs, "decoder_input_ids": [start, *ids[:-1]]},
                ids,
                is_cut=any(cuts),
                text=label_of([*inputs["input_ids"], *ids]),
            )
            for inputs, ids, *cuts in zip(
                _split(encoded), wanted["input_ids"], cut, cut_too, strict=True
            )
        ]

    def batch(self, examples: Sequence[Example], size: int, path: Path) -> tuple[list[Batch], str]:
        """Batches padded on the right, and a note if rows without a target were left out."""
        kept = [example for example in examples if example.number_of_targets]
        if not kept:
            raise TaskError(f"{path}: no row has a token to predict; check its columns")
        per_row = sum(example.number_of_targets for example in kept) / len(kept)
        starts = range(0, len(kept), size)
        batches = [self._stack(kept[start : start + size], per_row) for start in starts]
        out = len(examples) - len(kept)
        return batches, f"{path}: {out} rows left out: no token to predict" if out else ""

    def _encode(self, *texts: list[Any], **options: Any) -> tuple[Any, list[bool]]:
        """Encode texts, or pairs of them, cut to max_length; and say which of them were cut."""
        whole = self.tokenizer(*texts, verbose=False, **options)["input_ids"]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.max_length, **options)
        return encoded, [len(ids) > self.max_length for ids in whole]

    def _stack(self, examples: Sequence[Example], per_row: float) -> Batch:
        batch: Batch = {
            key: _pad(
                [example.inputs[key] for example in examples],
                self.padding if key == "input_ids" else 0,
            )
            for key in examples[0].inputs
        }
        targets = [example.targets for example in examples]
        if isinstance(targets[0], list):
            batch["targets"] = _pad(targets, IGNORED)  # type: ignore[arg-type]
        else:
            batch["targets"] = torch.tensor(targets)
        if examples[0].text is not None:
            batch[TEXTS] = torch.tensor([example.text for example in examples])
        return {**batch, "targets_per_row": per_row}


def label_of(ids: list[int]) -> int:
    """A number that only texts with the same tokens share."""
    digest = blake2b(array("q", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _split(encoded: Any) -> Iterator[dict[str, list[int]]]:
    """A tokenizer's columns as one dict per row."""
    keys = [key for key in encoded if key in ("input_ids", "attention_mask", "token_type_ids")]
    for values in zip(*(encoded[key] for key in keys), strict=True):
        yield dict(zip(keys, values, strict=True))


def _pad(rows: Sequence[list[int]], value: int) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def as_text(row: Row, column: str) -> str:
    return _checked(row, column, row.get(column))


def _checked(row: Row, column: str, value: object) -> str:
    if not isinstance(value, str):
        raise TaskError(f"{row.where}: {column}: must be text, found {type(value).__name__}")
    check_unicode(f"{row.where}: {column}", value)
    return value


def check_unicode(where: str, text: str) -> None:
    """JSON can say half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TaskError(f"{where}: is not valid Unicode; save it as UTF-8") from None


def _tags(row: Row, words: str, tags: str, labels: Labels) -> list[int]:
    for column in (words, tags):
        if not isinstance(row.get(column), list):
            found = type(row.get(column)).__name__
            raise TaskError(f"{row.where}: {column}: must be a list, found {found}")
    number = len(row.get(words))
    if len(row.get(tags)) != number:
        raise TaskError(f"{row.where}: {number} {words}, but {len(row.get(tags))} {tags}")
    return [labels.number(row, tags, tag) for tag in row.get(tags)]
