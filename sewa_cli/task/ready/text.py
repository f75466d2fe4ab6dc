"""Turns texts into batches of tokens, for the four kinds of language tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.batches import IGNORED, Batch
from sewa_cli.task.ready.tables import Labels, Row

_KEPT, _RANDOM = 0.1, 0.1  # of the masked: left as they are, replaced by any token


@dataclass(frozen=True)
class Example:
    """One row, tokenised: what the model takes, and a target for each token, or one for all."""

    inputs: dict[str, list[int]]
    targets: list[int] | float | int

    @property
    def number_of_targets(self) -> int:
        if not isinstance(self.targets, list):
            return 1
        return sum(target != IGNORED for target in self.targets)


@dataclass(frozen=True)
class Reader:
    """Tokenises rows; `tokenizer` is one of transformers', `padding` its padding token's number."""

    tokenizer: Any
    max_length: int
    padding: int

    def causal(self, rows: Sequence[Row], column: str) -> list[Example]:
        """Every token is the target of the one before it."""
        encoded = self._encode([_text(row, column) for row in rows])
        return [
            Example(inputs, [*inputs["input_ids"][1:], IGNORED][: len(inputs["input_ids"])])
            for inputs in _split(encoded)
        ]

    def masked(
        self, rows: Sequence[Row], column: str, probability: float, seed: int
    ) -> list[Example]:
        """Some tokens are masked (80 %), replaced (10 %) or kept (10 %), and are the targets.

        Drawn once, row by row: every average is evaluated on the same masks, whatever the batches.
        """
        if self.tokenizer.mask_token_id is None:
            raise TaskError("kind: masked-lm: the tokenizer has no mask token")
        draw = random.Random(seed)
        special = set(self.tokenizer.all_special_ids)
        words = [i for i in range(len(self.tokenizer)) if i not in special]
        examples = []
        for inputs in _split(self._encode([_text(row, column) for row in rows])):
            targets = [IGNORED] * len(inputs["input_ids"])
            seen = list(inputs["input_ids"])
            for place, token in enumerate(inputs["input_ids"]):
                if token in special or draw.random() >= probability:
                    continue
                targets[place] = token
                fate = draw.random()
                if fate >= _KEPT + _RANDOM:
                    seen[place] = self.tokenizer.mask_token_id
                elif fate >= _KEPT:
                    seen[place] = draw.choice(words)
            examples.append(Example({**inputs, "input_ids": seen}, targets))
        return examples

    def classified(
        self,
        rows: Sequence[Row],
        columns: Sequence[str],
        target: Callable[[Row], float | int],
    ) -> list[Example]:
        """One target for each text, or pair of texts."""
        encoded = self._encode(*([_text(row, column) for row in rows] for column in columns))
        return [
            Example(inputs, target(row)) for row, inputs in zip(rows, _split(encoded), strict=True)
        ]

    def tagged(self, rows: Sequence[Row], words: str, tags: str, labels: Labels) -> list[Example]:
        """A tag for each word: the target of its first token; its other tokens have none."""
        if not self.tokenizer.is_fast:
            raise TaskError("kind: token-classification: needs a fast tokenizer (tokenizer.json)")
        numbers = [_tags(row, words, tags, labels) for row in rows]
        encoded = self._encode([list(row.get(words)) for row in rows], is_split_into_words=True)
        examples = []
        for i, inputs in enumerate(_split(encoded)):
            places = encoded.word_ids(i)
            targets = [
                numbers[i][word] if word is not None and word != before else IGNORED
                for before, word in zip([None, *places], places, strict=False)
            ]
            examples.append(Example(inputs, targets))
        return examples

    def batch(self, examples: Sequence[Example], size: int, path: Path) -> tuple[list[Batch], str]:
        """Batches padded on the right, and a note if rows without a target were left out."""
        kept = [example for example in examples if example.number_of_targets]
        if not kept:
            raise TaskError(f"{path}: no row has a token to predict")
        per_row = sum(example.number_of_targets for example in kept) / len(kept)
        starts = range(0, len(kept), size)
        batches = [self._stack(kept[start : start + size], per_row) for start in starts]
        out = len(examples) - len(kept)
        return batches, f"{path}: {out} rows left out: no token to predict" if out else ""

    def _encode(self, *texts: Any, **options: Any) -> Any:
        return self.tokenizer(*texts, truncation=True, max_length=self.max_length, **options)

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
        return {**batch, "targets_per_row": per_row}


def _split(encoded: Any) -> Iterator[dict[str, list[int]]]:
    """A tokenizer's columns as one dict per row."""
    keys = [key for key in encoded if key in ("input_ids", "attention_mask", "token_type_ids")]
    for values in zip(*(encoded[key] for key in keys), strict=True):
        yield dict(zip(keys, values, strict=True))


def _pad(rows: Sequence[list[int]], value: int) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise TaskError(f"{row.where}: {column}: must be text, found {type(value).__name__}")
    return value


def _tags(row: Row, words: str, tags: str, labels: Labels) -> list[int]:
    for column in (words, tags):
        if not isinstance(row.get(column), list):
            found = type(row.get(column)).__name__
            raise TaskError(f"{row.where}: {column}: must be a list, found {found}")
    number = len(row.get(words))
    if len(row.get(tags)) != number:
        raise TaskError(f"{row.where}: {number} {words}, but {len(row.get(tags))} {tags}")
    return [labels.number(row, tags, tag) for tag in row.get(tags)]
