"""NeMo's .nemo and stable-baselines3's .zip: archives with a PyTorch file of weights in them."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

from sewa_cli.errors import CheckpointError
from sewa_cli.files import MIB, open_regular
from sewa_cli.text import few, shown

WEIGHTS = {".nemo": "model_weights.ckpt", ".zip": "policy.pth"}


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of weights: the file itself or, in an archive, its member."""
    if path.suffix not in WEIGHTS:
        with open_regular(path) as file:
            yield file
    elif path.suffix == ".zip":
        with _zip(path) as archive:
            yield BytesIO(archive.read(_find(path, archive.namelist())))
    else:
        with _tar(path) as tar:
            if any(info.issparse() for info in tar):
                raise ValueError("it has sparse files, which NeMo never writes")
            found = {info.name: info for info in tar if info.isreg()}
            member = tar.extractfile(found[_find(path, list(found))])
            assert member is not None  # as it is regular
            yield member


def read_member(path: Path, name: str) -> bytes:
    """Return what is in a zip under this name."""
    with _zip(path) as archive:
        return archive.read(name)


def rewrite(source: Path, weights: bytes, target: IO[bytes]) -> None:
    """Write an archive with other weights and else the same members."""
    if source.suffix == ".zip":
        with _zip(source) as old, ZipFile(target, "w") as new:
            for member in old.infolist():
                is_weights = member.filename == WEIGHTS[".zip"]
                new.writestr(member, weights if is_weights else old.read(member))
        return
    with _tar(source) as tar, tarfile.open(fileobj=target, mode="w:") as made:
        for info in tar:
            content = tar.extractfile(info) if info.isreg() else None
            if content is not None and _is_weights(source, info.name):
                info.size, content = len(weights), BytesIO(weights)
            made.addfile(info, content)


def _find(path: Path, names: list[str]) -> str:
    found = next((name for name in names if _is_weights(path, name)), None)
    if found is None:
        there = few([shown(name, 40) for name in names], 8) or "nothing"
        raise CheckpointError(f"{path}: has no {WEIGHTS[path.suffix]} in it; it holds {there}")
    return found


def _is_weights(path: Path, name: str) -> bool:
    return name.removeprefix("./") == WEIGHTS[path.suffix]


@contextmanager
def _zip(path: Path) -> Iterator[ZipFile]:
    with open_regular(path) as file, ZipFile(file) as archive:
        members = archive.infolist()
        if min((member.header_offset for member in members), default=0):
            raise BadZipFile  # cut short, and this is the list of an archive inside
        if any(member.compress_type for member in members):
            raise ValueError("it is compressed, which stable-baselines3 never does")
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its members overlap")
        yield archive


@contextmanager
def _tar(path: Path) -> Iterator[tarfile.TarFile]:
    with open_regular(path) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        source: IO[bytes] = file
        if is_packed:
            most = 10 * path.stat().st_size + MIB  # weights do not shrink by more
            source = BytesIO(gzip.GzipFile(fileobj=file).read(most + 1))
            if len(source.getbuffer()) > most:
                raise ValueError("it is compressed more than weights can be")
        with tarfile.open(fileobj=source, mode="r:") as tar:
            yield tar
