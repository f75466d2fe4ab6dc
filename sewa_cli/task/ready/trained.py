"""Warnings of data that the model seems to have been trained on, by names and the run's records.

An average chosen by such data may do worse on new data. These are hints: silence proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sewa_cli.files import MIB, parse_json, read_bytes, real

# what trainers leave next to a model, and what can be read without running anything
RECORDS: Final = ("training_args.json", "trainer_state.json", "args.json")
_TRAINED: Final = {"train", "training", "trainset", "traindata"}
_FRESH: Final = {
    *("val", "valid", "validation", "validate", "dev", "test", "eval", "evaluation", "heldout"),
    *("holdout", "selection", "untrained", "not"),
}
_DATA: Final = {"data", "dataset", "datasets", "file", "files", "path", "paths"}
_WHY: Final = (
    "rows that the model has seen reward what it remembers, and an average chosen or judged by "
    "them may do worse on new ones"
)


def warnings_of(sources: Mapping[str, Path], places: Iterable[Path]) -> Iterator[str]:
    """Yield a sentence for each file that seems to be training data; `places` are run folders."""
    named = list(_named_in(places))
    for path in dict.fromkeys(sources.values()):
        used = " and ".join(part for part, own in sources.items() if own == path)
        record = next((record for record, text in named if _is_same(path, text, record)), None)
        if record is not None or _says_train(path):
            by = "its name" if record is None else record
            yield f"{path}: is training data by {by}, and used for {used}: {_WHY}; use fresh rows"


def _words(name: str) -> set[str]:
    """Split a name: train-00000-of-00001.parquet is train, of, parquet."""
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def _says_train(path: Path) -> bool:
    """Look at the file's name, and at that of a split's folder."""
    own, above = _words(path.name), path.absolute().parent.name.lower()
    return bool(own & _TRAINED or above == "train") and not own & _FRESH


def _named_in(places: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each text in a record that may name training data, with the record."""
    for record in dict.fromkeys(place / name for place in places for name in RECORDS):
        with suppress(OSError, ValueError):  # only hints
            for text in _texts(parse_json(read_bytes(record, 16 * MIB)), ()):
                yield record, text


def _texts(content: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield texts below a key that names data, of training or of no part in particular."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _texts(value, (*keys, str(key)))
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value, keys)
    elif isinstance(content, str) and keys:
        words = set().union(*map(_words, keys))
        if words & (_TRAINED | _DATA) and not words & _FRESH:
            yield content


def _is_same(path: Path, text: str, record: Path) -> bool:
    """Compare files; one that is not here (the run was on another machine) by its name."""
    with suppress(OSError, ValueError):
        named = Path(text)
        found = [p for p in (named, record.parent / named) if p.exists()]
        if found:
            return any(real(p) == real(path) for p in found)
        return bool(named.suffix) and named.name == path.name
    return False
