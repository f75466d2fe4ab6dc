"""Files that `sewa init` and `sewa demo` copy into a user's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from sewa_cli.errors import OutputError
from sewa_cli.publish import check_free, new_output


def write_template(
    name: str, folder: Path, force: bool = False, keep: Callable[[str], None] | None = None
) -> list[Path]:
    """Copy the files of a template; return those that were written.

    `keep`: leave a file as it is if it is there already, and tell about it. Without it, or if all
    files are there, an existing file is refused before the first is written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}") from error
    sources = sorted((files(__name__) / name).iterdir(), key=lambda source: source.name)
    texts = {folder / source.name: source.read_bytes() for source in sources if source.is_file()}
    if keep is not None and not force:
        there = [path for path in texts if os.path.lexists(path)]
        if len(there) == len(texts):
            named = " and ".join(map(str, there))
            raise OutputError(f"{named}: nothing left to write; --force overwrites what is there")
        for path in there:
            del texts[path]
            keep(f"{path}: exists, and is left as it is")
    for path in texts:
        check_free(path, force)
    for path, text in texts.items():
        with new_output(path, force) as file:
            file.write(text)
    return list(texts)
