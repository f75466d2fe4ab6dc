"""Local folders that stand for remote ones: a file in them is fetched when it is opened.

`remote` makes them. The modules that open files only know this one, which imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, Final, Protocol

_URL: Final = re.compile(r"(hf|s3|gs|az|https?|sftp|memory):/+(.*)", re.DOTALL)
_USER: Final = re.compile(r"(\w:/+)[^/\s@]*:[^/\s@]*@")
_QUERY: Final = re.compile(r"(\w:/+[^\s?]*)\?[^\s'\")]+")
OPEN: Final[dict[str, Mirror]] = {}  # by the folder that it fills


class Mirror(Protocol):
    def bring(self, path: Path, whole: bool) -> None:
        """Fetch a file, or its header at least, unless it is there."""

    def is_whole(self, path: Path) -> bool:
        """Whether the file is here, or will be as soon as it is opened."""

    def blocks(self, path: Path) -> Iterator[Any]:
        """Yield the file's bytes in order; they need not be kept."""

    def stamp(self, path: Path, fresh: bool) -> tuple[int, int] | None:
        """Return the file's size and a number that changes with it; `fresh`: by asking again."""

    def close(self) -> None: ...


def url_of(path: PurePath | str) -> str | None:
    """Return s3://bucket/run for s3:/bucket/run, as which it is parsed; None: it is local."""
    found = _URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else None


def named(text: object) -> str:
    """Return the text with remote files called by their URLs, and without credentials in URLs."""
    line = _QUERY.sub(r"\1", _USER.sub(r"\1", str(text)))
    for folder in OPEN:
        line = re.sub(re.escape(folder) + r"/([a-z0-9]+):/", r"\1://", line)
    return line


def mirror_of(path: Path) -> Mirror | None:
    place = str(path)
    return next((one for folder, one in OPEN.items() if place.startswith(f"{folder}/")), None)


def bring(path: Path, whole: bool = True) -> None:
    """Make sure that a file can be read, if it stands for a remote one."""
    if (mirror := mirror_of(path)) is not None:
        mirror.bring(path, whole)


def close() -> None:
    while OPEN:
        OPEN.popitem()[1].close()
