"""Labels of rows: their names and their numbers, from a model's config or from the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.tables import Row
from sewa_cli.text import few


class Labels:
    """Names → numbers; every number must be one of the classes."""

    def __init__(self, names: Mapping[str, int], classes: int, where: str) -> None:
        self._names = dict(names)
        self._classes = classes
        self._where = where  # where the names come from, for errors

    def number(self, row: Row, column: str, label: Any) -> int:
        """Return the class of a label; TaskError with its row and column if there is none."""
        if isinstance(label, str) and label in self._names:
            return self._names[label]
        number = _whole(label)
        if number is None:
            known = few(list(self._names), 8) or "no names"
            raise TaskError(
                f"{row.where}: {column}: {label!r} is not a label; {self._where} has {known}"
            )
        if not 0 <= number < self._classes:
            raise TaskError(
                f"{row.where}: {column}: {number} is outside 0..{self._classes - 1}, "
                f"as {self._where} has {self._classes} labels"
            )
        return number


def labels_of_config(
    label2id: Mapping[str, int], classes: int, seen: Iterable[Any]
) -> tuple[Labels, list[str]]:
    """Return the names in a model's config, or in the data if it has only LABEL_0 …, and notes."""
    own = {str(name): int(number) for name, number in label2id.items()}
    if own != {f"LABEL_{i}": i for i in range(classes)}:
        return Labels(own, classes, "label2id in config.json"), []
    names = sorted({label for label in seen if _whole(label) is None and isinstance(label, str)})
    names = [name for name in names if name not in own]
    if not names:
        return Labels(own, classes, "config.json"), []
    if len(names) != classes:
        raise TaskError(
            f"the data has {len(names)} labels ({few(names, 8)}), and config.json "
            f"{classes} without names: write them into its label2id"
        )
    numbered = {name: i for i, name in enumerate(names)}
    return Labels(numbered, classes, "the data"), [note_of_order(names)]


def note_of_order(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name}={i}" for i, name in enumerate(names[:20]))
    return f"labels in sorted order: {shown}" + (" …" if len(names) > 20 else "")


def _whole(label: Any) -> int | None:
    """A whole number, also as text (in a csv, everything is text)."""
    if isinstance(label, bool):
        return None
    if isinstance(label, int):
        return label
    if isinstance(label, float) and label.is_integer():
        return int(label)
    if isinstance(label, str) and label.strip().lstrip("+-").isdecimal():
        return int(label)
    return None
