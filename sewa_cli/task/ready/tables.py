"""Rows of data: jsonl, json, csv, parquet, text; folders of texts, images, or saved by `datasets`.

Nothing is written or downloaded, and only the rows that are asked for are kept.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr, Final

from sewa_cli.errors import TaskError
from sewa_cli.files import MIB, open_regular, parse_json
from sewa_cli.text import one_line, size

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TEXT_SUFFIXES = {".txt", ".md"}
PACKED = (".gz", ".zst")  # after the suffix that says what is in it
_BOM: Final = b"\xef\xbb\xbf"
_LONGEST: Final = 256 * MIB  # a row, or a file that has to be read whole


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

    @property
    def names(self) -> Sequence[str]:
        """Of its columns; where every row has its own, those of the first."""
        if self.columns is not None:
            return self.columns
        [first] = self.take([0], [])
        return list(first.values)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """These rows, in this order; `columns`: those that will be used."""
        for column in columns if self.columns is not None else ():
            if column not in self.columns:  # type: ignore[operator]
                there = _named(self.columns)
                raise TaskError(f"{self.path}: no column {column!r}; there are {there}")
        with _reading(self.path):
            return self.pick(indices, list(columns))


def open_table(path: Path) -> Table:
    """By its name or its content; TaskError if it cannot be read or holds no rows."""
    with _reading(path):
        table = _open(path)
    if table.rows == 0:
        raise TaskError(f"{path}: holds no rows")
    return table


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, csv.Error, EOFError, zlib.error) as error:
        # ValueError: wrong bytes; the last two: of a packed file
        reason = one_line(getattr(error, "strerror", None) or error, 300)
        raise TaskError(f"{path}: cannot be read: {reason}") from error


def _open(path: Path) -> Table:
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(str(p) for p in path.iterdir() if p.is_dir())
            raise TaskError(f"{path}: holds splits; name one of them: {_named(splits)}")
        return _saved(path) if (path / "state.json").exists() else _folder(path)
    kinds = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json,
        ".csv": _csv,
        ".parquet": _parquet,
        ".txt": _text,
        ".md": _text,
    }
    *_, kind = ["", *(s for s in path.suffixes if s.lower() not in PACKED)]
    is_packed = path.suffix.lower() in PACKED
    if kind.lower() not in kinds or (is_packed and kind.lower() == ".parquet"):
        raise TaskError(
            f"{path}: must be a folder or one of {_named(kinds)}; all but .parquet also as .gz "
            "or .zst"
        )
    return kinds[kind.lower()](path)


def _opened(path: Path) -> IO[bytes]:
    """What is in it, unpacked."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        pyarrow = _pyarrow(path)
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return open_regular(path)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise TaskError(f"{path}: needs pyarrow: pip install pyarrow") from None
    return pyarrow


def _whole(path: Path) -> bytes:
    with _opened(path) as file:
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise ValueError(f"is larger than {size(_LONGEST)}, the most that is read at once")
    return content.removeprefix(_BOM)


def _lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Of which none fills the memory."""
    number = 1
    while line := file.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise ValueError(f"row {number} is longer than {size(_LONGEST)}")
        yield line
        number += 1


def _json_lines(path: Path) -> Table:
    """One JSON object per line. Read twice: to count the rows, and to take some."""

    def lines() -> Iterator[tuple[int, bytes]]:
        """Those that are not blank, with their numbers in the file."""
        with _opened(path) as file:
            for number, line in enumerate(_lines(file), 1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip():
                    yield number, text

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        wanted, rows, last = set(indices), dict[int, Row](), max(indices)
        for i, (number, line) in enumerate(lines()):
            if i in wanted:
                where = f"{path}: row {number}"
                try:
                    rows[i] = _as_row(where, parse_json(line))
                except ValueError as error:
                    raise TaskError(f"{where}: is not JSON: {one_line(error)}") from error
            if i == last:
                break
        return [rows[i] for i in indices]

    return Table(path, sum(1 for _ in lines()), None, pick)


def _json(path: Path) -> Table:
    """A list of objects; many a file of that name holds lines of them instead."""
    with _opened(path) as file:
        start = file.read(1024).removeprefix(_BOM).lstrip()
    if not start.startswith(b"["):
        return _json_lines(path)
    content = parse_json(_whole(path))

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        return [_as_row(f"{path}: row {i + 1}", content[i]) for i in indices]

    return Table(path, len(content), None, pick)


def _as_row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise TaskError(f"{where}: must be an object with columns")
    return Row(where, values)


def _csv(path: Path) -> Table:
    """With a header line. All values are text. Read twice: to count the rows, and to take some."""

    def read() -> Iterator[dict[str, Any]]:
        kept = csv.field_size_limit(_LONGEST)  # a text may be long
        try:
            with io.TextIOWrapper(_opened(path), newline="", encoding="utf-8-sig") as file:
                yield from csv.DictReader(_lines(file))
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
    _pyarrow(path)
    from pyarrow.parquet import ParquetFile

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
        raise TaskError(f"{path}: needs datasets: pip install datasets") from None
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


def _text(path: Path) -> Table:
    return _texts(path, [path])


def _texts(path: Path, files: Sequence[Path]) -> Table:
    """Each file is one text; column `text`."""

    def pick(indices: Sequence[int], _: list[str]) -> list[Row]:
        rows = []
        for file in (files[i] for i in indices):
            with _reading(file):
                rows.append(Row(str(file), {"text": _whole(file).decode("utf-8")}))
        return rows

    return Table(path, len(files), ["text"], pick)


def _folder(path: Path) -> Table:
    """Images in a folder for each class, else texts: *.txt and *.md, at any depth."""
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

    return Table(root, len(images), ["image", "label"], pick)


def _inside(folder: Path, suffixes: set[str]) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in suffixes and p.is_file()]


def _named(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"
