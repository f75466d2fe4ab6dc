"""Rows of data: jsonl, json, csv, parquet, text; folders of texts, images, or saved by `datasets`.

Nothing is written or downloaded, and only the rows that are asked for are kept.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from sewa_cli.errors import TaskError
from sewa_cli.files import open_regular, parse_json
from sewa_cli.task.ready import import_library
from sewa_cli.text import few, one_line

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TEXT_SUFFIXES = {".txt", ".md"}
COMPRESSED = (".gz", ".zst")  # after the suffix that says what is in it


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
            raise TaskError(f"{self.where}: {column}: is empty; remove the row")
        return value


@dataclass(frozen=True)
class DataTable:
    """The rows of a data file; `columns` None: every row has its own."""

    path: Path
    rows: int
    columns: Sequence[str] | None
    pick: Callable[[Sequence[int], list[str]], list[Row]]

    def __len__(self) -> int:
        return self.rows

    @property
    def names(self) -> Sequence[str]:
        """Return the columns; where every row has its own, those of the first."""
        if self.columns is not None:
            return self.columns
        [first] = self.take([0], [])
        return list(first.values)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """Return these rows in this order; `columns` are those that will be used."""
        for column in columns if self.columns is not None else ():
            if column not in self.columns:  # type: ignore[operator]
                there = _named(self.columns)
                raise TaskError(f"{self.path}: no column {column!r}; there are {there}")
        with _reading(self.path):
            return self.pick(indices, list(columns))


def open_table(path: Path) -> DataTable:
    """Open a file by its name, or a folder; TaskError if it cannot be read or has no rows."""
    with _reading(path):
        table = _open(path)
    if table.rows == 0:
        raise TaskError(f"{path}: holds no rows; name a file with data")
    return table


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, csv.Error, EOFError, zlib.error) as error:
        # ValueError: wrong bytes; the last two: from a compressed file
        reason = one_line(getattr(error, "strerror", None) or error, 300)
        raise TaskError(f"{path}: cannot be read: {reason}") from error


def _open(path: Path) -> DataTable:
    if path.is_dir():
        return _open_folder(path)
    kinds = {
        **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
        ".json": _json,
        ".csv": _csv,
        ".parquet": _parquet,
        **dict.fromkeys((".txt", ".md"), _text),
    }
    *_, kind = ["", *(suffix for suffix in path.suffixes if suffix.lower() not in COMPRESSED)]
    is_compressed = path.suffix.lower() in COMPRESSED
    if kind.lower() not in kinds or (is_compressed and kind.lower() == ".parquet"):
        raise TaskError(
            f"{path}: must be a folder or one of {_named(kinds)}; all but .parquet also as .gz "
            "or .zst"
        )
    return kinds[kind.lower()](path)


def _opened(path: Path) -> TextIO:
    """Open a file as text, decompressed."""
    file: Any
    if path.suffix.lower() == ".gz":
        file = gzip.open(path)  # noqa: SIM115 - closed with the text around it
    elif path.suffix.lower() == ".zst":
        file = import_library(f"{path}:", "pyarrow").input_stream(str(path), compression="zstd")
    else:
        file = open_regular(path)
    return io.TextIOWrapper(file, newline="", encoding="utf-8-sig")


# ---- files of rows -------------------------------------------------------------------------------


def _streamed(
    path: Path, read: Callable[[], Iterator[tuple[str, Any]]], parse: Callable[[str, Any], Row]
) -> DataTable:
    """Return a table whose rows are read twice: to count them all, and to parse some.

    `read` yields where a row stands, and its content.
    """

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        wanted = set(indices)
        some = enumerate(islice(read(), max(indices) + 1))
        rows = {i: parse(*row) for i, row in some if i in wanted}
        return [rows[i] for i in indices]

    return DataTable(path, sum(1 for _ in read()), None, pick)


def _json_lines(path: Path) -> DataTable:
    """Open a file with a JSON object on each line that is not blank."""

    def read() -> Iterator[tuple[str, str]]:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}: row {number}", line

    def parse(where: str, line: str) -> Row:
        try:
            return _as_row(where, parse_json(line))
        except ValueError as error:
            raise TaskError(f"{where}: is not JSON: {one_line(error)}") from error

    return _streamed(path, read, parse)


def _json(path: Path) -> DataTable:
    """Open a list of objects; many files of that name have lines of them instead."""
    with _opened(path) as file:
        text = file.read()
    if not text.lstrip().startswith("["):
        return _json_lines(path)
    rows = ((f"{path}: row {i}", row) for i, row in enumerate(parse_json(text), 1))
    return _streamed(path, list(rows).__iter__, _as_row)


def _as_row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise TaskError(f"{where}: must be an object with columns")
    return Row(where, values)


def _csv(path: Path) -> DataTable:
    """Open a file with a header line; all values are text."""

    def read() -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(2**31 - 1)  # a text may be long
        with _opened(path) as file:
            for number, values in enumerate(csv.DictReader(file), 1):
                yield f"{path}: row {number}", values

    return _streamed(path, read, Row)


def _parquet(path: Path) -> DataTable:
    import_library(f"{path}:", "pyarrow")
    from pyarrow import dataset

    data = dataset.dataset(path, format="parquet")

    def pick(indices: Sequence[int], columns: list[str]) -> list[Row]:
        return _numbered(path, indices, data.take(list(indices), columns=columns).to_pylist())

    return DataTable(path, data.count_rows(), data.schema.names, pick)


def _saved(path: Path) -> DataTable:
    """Open a folder that `Dataset.save_to_disk` has written; it is memory-mapped."""
    datasets = import_library(f"{path}:", "datasets")
    data: Any = datasets.load_from_disk(path)
    for name, feature in data.features.items():
        if isinstance(feature, datasets.Image):  # as bytes: decoded batch by batch
            data = data.cast_column(name, datasets.Image(decode=False))

    def pick(indices: Sequence[int], columns: list[str]) -> list[Row]:
        rows = data.select_columns(columns).with_format(None)
        return _numbered(path, indices, [rows[int(i)] for i in indices])

    return DataTable(path, len(data), data.column_names, pick)


def _numbered(path: Path, indices: Sequence[int], rows: Sequence[Any]) -> list[Row]:
    return [Row(f"{path}: row {i + 1}", row) for i, row in zip(indices, rows, strict=True)]


# ---- texts and folders ---------------------------------------------------------------------------


def _text(path: Path) -> DataTable:
    return _texts(path, [path])


def _texts(path: Path, files: Sequence[Path]) -> DataTable:
    """Open files as rows with one column, `text`."""

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        rows = []
        for file in (files[i] for i in indices):
            with _reading(file), _opened(file) as content:
                rows.append(Row(str(file), {"text": content.read()}))
        return rows

    return DataTable(path, len(files), ["text"], pick)


def _open_folder(path: Path) -> DataTable:
    """Open what `datasets` saved, images in a folder for each class, or texts at any depth."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(str(p) for p in path.iterdir() if p.is_dir())
        raise TaskError(f"{path}: holds splits; name one of them: {_named(splits)}")
    if (path / "state.json").exists():
        return _saved(path)
    root = path.absolute()  # images are opened later, perhaps from another directory
    classes = sorted(p for p in root.iterdir() if p.is_dir())
    images = [p for folder in classes for p in _inside(folder, IMAGE_SUFFIXES)]
    if not images:
        if texts := _inside(path, TEXT_SUFFIXES):
            return _texts(path, texts)
        raise TaskError(
            f"{path}: is neither a saved `datasets` folder, nor one of texts (*.txt, *.md), nor "
            "one of images by class"
        )

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        chosen = (images[i] for i in indices)
        return [Row(str(p), {"image": p, "label": p.relative_to(root).parts[0]}) for p in chosen]

    return DataTable(root, len(images), ["image", "label"], pick)


def _inside(folder: Path, suffixes: set[str]) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in suffixes and p.is_file()]


def _named(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


# ---- labels of rows: their names and numbers, from a model's config or from the data ------------


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
