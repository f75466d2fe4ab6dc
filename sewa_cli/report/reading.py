"""Read any report from a file that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError
from pydantic_core import from_json

from sewa_cli.errors import CheckpointError
from sewa_cli.files import check_values, read_bytes
from sewa_cli.report import KINDS, model_of
from sewa_cli.report.part import SCHEMA_VERSION
from sewa_cli.text import one_line

if TYPE_CHECKING:
    from sewa_cli.report.shared import Head

MOST: Final = 2**26  # bytes of a report that are read
MOST_SHOWN: Final = 2**24  # and where all of it is to be looked at
MOST_VALUES: Final = 500_000  # in such a one; if all are wrong, pydantic keeps a kilobyte of each


def read_any(path: Path) -> Head:
    """Read a report by the model of its kind; `fit` says whether its parts are consistent."""
    try:
        return _validated(read_bytes(path, MOST_SHOWN), path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a report of sewa: {why(error)}") from None


def _validated(text: bytes, path: Path) -> Head:
    check_values(text, MOST_VALUES)
    content = from_json(text)
    if not isinstance(content, dict):
        raise ValueError("is no JSON object")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"its kind is {kind!r:.40}, and none of {', '.join(KINDS)}")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: its schema_version is {version!r:.40}, and this version of sewa shows "
            f"{SCHEMA_VERSION}; run the command again, or use the version that wrote it"
        )
    return model_of(kind).model_validate(content)


def why(error: ValueError) -> str:
    """Return the first fault, in one line."""
    if not isinstance(error, ValidationError):
        return one_line(error, 200)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    return one_line(f"{where}: {first['msg']}", 200)
