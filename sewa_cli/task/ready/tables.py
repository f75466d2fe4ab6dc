"""Rows of a data file: jsonl, csv, parquet, a saved `datasets` folder, or a folder of images.

Nothing is written or downloaded, and only the rows that are asked for are kept.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sewa_cli.errors import TaskError
from sewa_cli.text import few, one_line

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One example. `where` names its file and its number, for errors."""

    where: str
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        if column not in self.values:
            raise TaskError(f"{self.where}: no column {column!r}; there are {_named(self.values)}")
        value = self.values[column]
        if value is None:
            raise TaskError(f"{self.where}: {column}: is empty")
        return value


class Table(Protocol):
    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """These rows, in this order; `columns`: those that will be used."""
        ...


def open_table(path: Path) -> Table:
    """By its name or its content; TaskError if it cannot be read or holds no rows."""
    try:
        table = _open(path)
        rows = len(table)
    except (OSError, ValueError, csv.Error) as error:  # ValueError: wrong bytes
        raise TaskError(
            f"{path}: cannot be read: {one_line(getattr(error, 'strerror', None) or error)}"
        ) from error
    if rows == 0:
        raise TaskError(f"{path}: holds no rows")
    return table


def _open(path: Path) -> Table:
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise TaskError(f"{path}: holds several splits; name one of them: {_named(splits)}")
        return _Saved(path) if (path / "state.json").exists() else _ImageFolder(path)
    kinds: dict[str, Callable[[Path], Table]] = {
        ".jsonl": _JsonLines,
        ".ndjson": _JsonLines,
        ".csv": _Csv,
        ".parquet": _Parquet,
    }
    if path.suffix.lower() not in kinds:
        raise TaskError(f"{path}: must be a folder or one of {_named(kinds)}")
    return kinds[path.suffix.lower()](path)


class _JsonLines:
    """One JSON object per line; only the positions of the lines are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: list[tuple[int, int]] = []  # (offset, number) of lines that are not blank
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._places.append((offset, number))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:  # noqa: ARG002
        rows = []
        with self._path.open("rb") as file:
            for offset, number in (self._places[i] for i in indices):
                file.seek(offset)
                where = f"{self._path}: row {number}"
                try:
                    values = json.loads(file.readline())
                except ValueError as error:
                    raise TaskError(f"{where}: is not JSON: {one_line(error)}") from error
                if not isinstance(values, dict):
                    raise TaskError(f"{where}: must be an object with columns")
                rows.append(Row(where, values))
        return rows


class _Csv:
    """With a header line. All values are text. Read twice: to count the rows, and to take some."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = sum(1 for _ in self._read())

    def __len__(self) -> int:
        return self._rows

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        wanted = set(indices)
        rows = {i: values for i, values in enumerate(self._read()) if i in wanted}
        _check_columns(self._path, columns, list(rows[indices[0]]))
        return [Row(f"{self._path}: row {i + 1}", rows[i]) for i in indices]

    def _read(self) -> Iterator[dict[str, Any]]:
        kept = csv.field_size_limit(_LONGEST_FIELD)  # a text may be long
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                yield from csv.DictReader(file)
        finally:
            csv.field_size_limit(kept)


class _Parquet:
    def __init__(self, path: Path) -> None:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise TaskError(f"{path}: needs pyarrow: pip install 'sewa-cli[hf]'") from None
        self._path = path
        self._file = ParquetFile(path)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        _check_columns(self._path, columns, self._file.schema_arrow.names)
        wanted, start = set(indices), 0
        rows: dict[int, dict[str, Any]] = {}
        for batch in self._file.iter_batches(columns=list(columns)):
            inside = [i for i in range(start, start + batch.num_rows) if i in wanted]
            taken = batch.take([i - start for i in inside]).to_pylist() if inside else []
            rows.update(zip(inside, taken, strict=True))
            start += batch.num_rows
        return [Row(f"{self._path}: row {i + 1}", rows[i]) for i in indices]


class _Saved:
    """A folder that `Dataset.save_to_disk` has written; memory-mapped."""

    def __init__(self, path: Path) -> None:
        try:
            import datasets
        except ImportError:
            raise TaskError(f"{path}: needs datasets: pip install 'sewa-cli[hf]'") from None
        self._path = path
        self._data = datasets.load_from_disk(path)
        for name, feature in self._data.features.items():
            if isinstance(feature, datasets.Image):  # as bytes: decoded batch by batch
                self._data = self._data.cast_column(name, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self._data)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        _check_columns(self._path, columns, self._data.column_names)
        data = self._data.select_columns(list(columns)).with_format(None)
        return [Row(f"{self._path}: row {i + 1}", data[int(i)]) for i in indices]


class _ImageFolder:
    """A folder for each class, with its images; columns `image` (a path) and `label` (a name)."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # images are opened later, perhaps from another directory
        self._images = [
            image
            for folder in sorted(p for p in self._path.iterdir() if p.is_dir())
            for image in sorted(folder.rglob("*"))
            if image.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not self._images:
            raise TaskError(
                f"{path}: is neither a saved `datasets` folder nor one of images by class"
            )

    def __len__(self) -> int:
        return len(self._images)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        _check_columns(self._path, columns, ["image", "label"])
        chosen = (self._images[i] for i in indices)
        return [Row(str(p), {"image": p, "label": self._class(p)}) for p in chosen]

    def _class(self, image: Path) -> str:
        return image.relative_to(self._path).parts[0]


def _check_columns(path: Path, wanted: Sequence[str], found: Sequence[str]) -> None:
    for column in wanted:
        if column not in found:
            raise TaskError(f"{path}: no column {column!r}; there are {_named(found)}")


def _named(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


# ---- labels ----------------------------------------------------------------------------------


class Labels:
    """Names → numbers; every number must be one of the classes."""

    def __init__(self, names: Mapping[str, int], classes: int, where: str) -> None:
        self._names = dict(names)
        self._classes = classes
        self._where = where  # where the names come from, for errors

    def number(self, row: Row, column: str, label: Any) -> int:
        """The class of one label; TaskError with its row and column if there is none."""
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
    """Names from a model's config; if it has only LABEL_0 …, those in the data, with a note."""
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
