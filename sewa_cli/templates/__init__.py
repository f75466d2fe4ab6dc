"""Files that `sewa init` and `sewa demo` copy into a user's folder."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import IO

from sewa_cli.errors import OutputError
from sewa_cli.output.journal import recover
from sewa_cli.output.place import check_free
from sewa_cli.output.publication import write_file


def write_template(name: str, folder: Path, force: bool = False) -> list[Path]:
    """Copy the files of a template; refuses before the first if one of them exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}") from error
    sources = sorted((files(__name__) / name).iterdir(), key=lambda source: source.name)
    sources = [source for source in sources if source.is_file()]
    paths = [folder / source.name for source in sources]
    recover(folder)
    for path in paths:
        check_free(path, force)
    for source, path in zip(sources, paths, strict=True):
        write_file(path, partial(_write, source.read_bytes()), force)
    return paths


def _write(text: bytes, file: IO[bytes]) -> None:
    file.write(text)
