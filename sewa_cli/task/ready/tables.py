"""Rows of a data file: jsonl, csv, parquet, a saved `datasets` folder, or a folder of images.

Nothing is written or downloaded, and only the rows that are asked for are kept.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sewa_cli.errors import TaskError
from sewa_cli.files import parse_json
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


@dataclass(frozen=True)
class Table:
    """The rows of a data file; `columns` None: every row has its own."""

    path: Path
    rows: int
    columns: Sequence[str] | None
    pick: Callable[[Sequence[int], list[str]], list[Row]]

    def __len__(self) -> int:
        return self.rows

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """These rows, in this order; `columns`: those that will be used."""
        for column in columns if self.columns is not None else ():
            if column not in self.columns:  # type: ignore[operator]
                there = _named(self.columns)
                raise TaskError(f"{self.path}: no column {column!r}; there are {there}")
        return self.pick(indices, list(columns))


def open_table(path: Path) -> Table:
    """By its name or its content; TaskError if it cannot be read or holds no rows."""
    try:
        table = _open(path)
    except (OSError, ValueError, csv.Error) as error:  # ValueError: wrong bytes
        reason = one_line(getattr(error, "strerror", None) or error)
        raise TaskError(f"{path}: cannot be read: {reason}") from error
    if table.rows == 0:
        raise TaskError(f"{path}: holds no rows")
    return table


def _open(path: Path) -> Table:
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise TaskError(f"{path}: holds several splits; name one of them: {_named(splits)}")
        return _saved(path) if (path / "state.json").exists() else _image_folder(path)
    kinds = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv, ".parquet": _parquet}
    if path.suffix.lower() not in kinds:
        raise TaskError(f"{path}: must be a folder or one of {_named(kinds)}")
    return kinds[path.suffix.lower()](path)


def _json_lines(path: Path) -> Table:
    """One JSON object per line; only the positions of the lines are kept."""
    places: list[tuple[int, int]] = []  # (offset, number) of lines that are not blank
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                places.append((offset, number))
            offset += len(line)

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        rows = []
        with path.open("rb") as file:
            for offset, number in (places[i] for i in indices):
                file.seek(offset)
                where = f"{path}: row {number}"
                try:
                    values = parse_json(file.readline())
                except ValueError as error:
                    raise TaskError(f"{where}: is not JSON: {one_line(error)}") from error
                if not isinstance(values, dict):
                    raise TaskError(f"{where}: must be an object with columns")
                rows.append(Row(where, values))
        return rows

    return Table(path, len(places), None, pick)


def _csv(path: Path) -> Table:
    """With a header line. All values are text. Read twice: to count the rows, and to take some."""

    def read() -> Iterator[dict[str, Any]]:
        kept = csv.field_size_limit(_LONGEST_FIELD)  # a text may be long
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                yield from csv.DictReader(file)
        finally:
            csv.field_size_limit(kept)

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        wanted = set(indices)
        return _numbered(path, indices, {i: row for i, row in enumerate(read()) if i in wanted})

    columns: list[str] = []
    count = 0
    for row in read():
        columns = columns or list(row)
        count += 1
    return Table(path, count, columns, pick)


def _parquet(path: Path) -> Table:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise TaskError(f"{path}: needs pyarrow: pip install 'sewa-cli[hf]'") from None
    file = ParquetFile(path)

    def pick(indices: Sequence[int], columns: list[str]) -> list[Row]:
        wanted, start = set(indices), 0
        rows: dict[int, dict[str, Any]] = {}
        for batch in file.iter_batches(columns=columns):
            inside = [i for i in range(start, start + batch.num_rows) if i in wanted]
            taken = batch.take([i - start for i in inside]).to_pylist() if inside else []
            rows.update(zip(inside, taken, strict=True))
            start += batch.num_rows
        return _numbered(path, indices, rows)

    return Table(path, int(file.metadata.num_rows), file.schema_arrow.names, pick)


def _saved(path: Path) -> Table:
    """A folder that `Dataset.save_to_disk` has written; memory-mapped."""
    try:
        import datasets
    except ImportError:
        raise TaskError(f"{path}: needs datasets: pip install 'sewa-cli[hf]'") from None
    data: Any = datasets.load_from_disk(path)
    for name, feature in data.features.items():
        if isinstance(feature, datasets.Image):  # as bytes: decoded batch by batch
            data = data.cast_column(name, datasets.Image(decode=False))

    def pick(indices: Sequence[int], columns: list[str]) -> list[Row]:
        rows = data.select_columns(columns).with_format(None)
        return _numbered(path, indices, {i: rows[int(i)] for i in indices})

    return Table(path, len(data), data.column_names, pick)


def _numbered(path: Path, indices: Sequence[int], rows: Mapping[int, Any]) -> list[Row]:
    return [Row(f"{path}: row {i + 1}", rows[i]) for i in indices]


def _image_folder(path: Path) -> Table:
    """A folder for each class, with its images; columns `image` (a path) and `label` (a name)."""
    root = path.absolute()  # images are opened later, perhaps from another directory
    images = [
        image
        for folder in sorted(p for p in root.iterdir() if p.is_dir())
        for image in sorted(folder.rglob("*"))
        if image.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not images:
        raise TaskError(f"{path}: is neither a saved `datasets` folder nor one of images by class")

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        chosen = (images[i] for i in indices)
        return [Row(str(p), {"image": p, "label": p.relative_to(root).parts[0]}) for p in chosen]

    return Table(root, len(images), ["image", "label"], pick)


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
