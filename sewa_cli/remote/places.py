"""Find the files that a URL names, by the library of its scheme."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from sewa_cli import mirrors
from sewa_cli.errors import CheckpointError, ConfigError, SewaError
from sewa_cli.text import one_line, shown

_EXTRAS: Final = {"hf": "hub", "s3": "s3", "gs": "gcs"}
_LIBRARIES: Final = {"az": "adlfs", "sftp": "paramiko", "http": "aiohttp", "https": "aiohttp"}
_TAGS: Final = ("ETag", "etag", "content_md5", "md5Hash", "mtime", "created", "LastModified")


def check_url(url: str) -> None:
    """Refuse credentials in a URL, which would end up in reports, and what leads elsewhere."""
    if ".." in PurePosixPath(url).parts:
        raise ConfigError(f"{url}: has .. in it; write the place in full")
    user = urlsplit(url).netloc.rpartition("@")[0]
    if "?" in url or ":" in user or (user and not url.startswith("sftp:")):
        raise ConfigError(
            f"{url}: a URL may hold no credentials and no query; use the environment or "
            "the configuration of its library"
        )


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the place of the URL in it."""
    from fsspec.core import url_to_fs

    scheme = url.partition(":")[0]
    try:
        fs, place = url_to_fs(url)
    except ImportError:
        extra, library = _EXTRAS.get(scheme), _LIBRARIES.get(scheme)
        what = f"'sewa-cli[{extra}]'" if extra else library
        raise ConfigError(f"{scheme}:// needs another library: pip install {what}") from None
    except Exception as error:
        raise failure(url, error) from error
    return fs, place


def list_files(fs: Any, place: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each file at a place, by its path relative to the place.

    A file that is the place itself has the empty path. HTTP has no listings.
    """
    if "https" in fs.protocol:
        return {"": fs.info(place)}
    fs.invalidate_cache()
    found = fs.find(place, detail=True)
    files = {name[len(place) :].strip("/"): info for name, info in found.items()}
    return {
        name: info
        for name, info in files.items()
        if info["type"] == "file" and ".." not in PurePosixPath(name).parts
    }


def tag_of(info: dict[str, Any]) -> str:
    """Return what changes when somebody writes to the file."""
    if info.get("lfs"):
        return str(info["lfs"]["sha256"])
    return str(info.get("blob_id") or next((info[tag] for tag in _TAGS if info.get(tag)), ""))


def failure(url: str, error: BaseException, kind: type[SewaError] = CheckpointError) -> SewaError:
    """Say in one line what a library reported."""
    if isinstance(error, SewaError):
        return error
    if isinstance(error, FileNotFoundError):
        return kind(f"{url}: no such file or folder")
    reason = one_line(error) or type(error).__name__
    hint = ""
    if isinstance(error, PermissionError) or re.search(r"\b40[13]\b", reason):
        hint = "; check the credentials that its library uses"
    return kind(f"{url}: {shown(mirrors.named(reason), 200)}{hint}")
