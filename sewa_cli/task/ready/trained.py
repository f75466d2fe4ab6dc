"""Data that the network was trained on, as far as names and the run's own records tell.

Choosing by rows that the model has seen chooses what it remembers. These are hints, not proofs: a
file may be called anything, and silence proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

from sewa_cli.config.yaml_file import read_value
from sewa_cli.files import MIB, parse_json, read_bytes, real

# what trainers leave beside a model and can be read without running anything: never *.bin
RECORDS: Final = ("training_args.json", "trainer_state.json", "args.json", "README.md")
_MOST = 16 * MIB
_MOST_CARD = MIB // 4  # PyYAML takes a second for it
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
    """A sentence for each file that seems to have been trained on; `places`: the run's folders."""
    named = list(_named_in(places))
    for path in dict.fromkeys(sources.values()):
        used = " and ".join(part for part, own in sources.items() if own == path)
        record = next((record for record, text in named if _is_same(path, text, record)), None)
        if record is not None or _says_train(path):
            by = "its name" if record is None else record
            yield f"{path}: is training data by {by}, and used for {used}: {_WHY}; use fresh rows"


def _words(name: str) -> set[str]:
    """train-00000-of-00001.parquet: train, of, parquet."""
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def _says_train(path: Path) -> bool:
    """By its own name, or by that of a split's folder."""
    own, above = _words(path.name), path.absolute().parent.name.lower()
    return bool(own & _TRAINED or above == "train") and not own & _FRESH


def _named_in(places: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Each text in a record that may be the name of training data, with the record."""
    for record in dict.fromkeys(place / name for place in places for name in RECORDS):
        with suppress(OSError, ValueError, yaml.YAMLError):  # only hints
            for text in _texts(_content(record), ()):
                yield record, text


def _content(record: Path) -> Any:
    content = read_bytes(record, _MOST_CARD if record.suffix == ".md" else _MOST)
    if record.suffix == ".json":
        return parse_json(content)
    head = re.match(r"---\r?\n(.*?)\r?\n---", content.decode("utf-8"), re.DOTALL)
    if head is None or any(isinstance(token, yaml.AliasToken) for token in yaml.scan(head[1])):
        return None  # a card is a stranger's, and a few aliases can stand for millions of values
    return read_value(head[1])


def _texts(content: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Below a key that names data, of training or of no part in particular."""
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
    """The same file, or one of that name which is not here: the run was on another machine."""
    with suppress(OSError, ValueError):
        named = Path(text)
        found = [p for p in (named, record.parent / named) if p.exists()]
        if found:
            return any(real(p) == real(path) for p in found)
        return bool(named.suffix) and named.name == path.name
    return False
