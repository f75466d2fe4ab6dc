"""Warnings of data that the model seems to have been trained on, by the names of files.

An average chosen by such data may do worse on new data. Names are hints: silence proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_TRAINED: Final = {"train", "training", "trainset", "traindata"}
_FRESH: Final = {
    *("val", "valid", "validation", "validate", "dev", "test", "eval", "evaluation", "heldout"),
    *("holdout", "selection", "untrained", "not"),
}
_WHY: Final = (
    "rows that the model has seen reward what it remembers, and an average chosen or judged by "
    "them may do worse on new ones"
)


def warnings_of(sources: Mapping[str, Path]) -> Iterator[str]:
    """Yield a sentence for each file that is training data by its name or its folder's."""
    for path in dict.fromkeys(sources.values()):
        words, above = _words(path.name), path.absolute().parent.name.lower()
        if (words & _TRAINED or above == "train") and not words & _FRESH:
            used = " and ".join(part for part, own in sources.items() if own == path)
            yield (
                f"{path}: is training data by its name, and used for {used}: {_WHY}; use fresh rows"
            )


def _words(name: str) -> set[str]:
    """Split a name: train-00000-of-00001.parquet is train, of, parquet."""
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
