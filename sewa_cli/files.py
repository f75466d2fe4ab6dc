"""Files from outside, read so that none of them can hang us, fill the memory or crash a parser.

What a system call would refuse and what we refuse are both an OSError with a `strerror` for people;
what is in a file and makes no sense is a ValueError. The caller knows what the file is for, and
makes of either an error with the right exit code.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any, Final

from sewa_cli.mirrors import bring
from sewa_cli.text import size

MIB: Final = 2**20
DEPTH: Final = 100  # levels of JSON
MOST_VALUES: Final = 4_000_000  # in JSON; the worst of them take 100 bytes each, and a microsecond
_DIGITS: Final = 300  # of a number that a float can still hold
_NO_NAME: Final = "is not a name that a file can have"
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def real(path: Path) -> Path:
    """Resolve links; unlike `resolve`, in every version of Python also where they go in circles."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, _NO_NAME) from error


def check_regular(path: Path) -> os.stat_result:
    """Raise OSError unless it is a regular file, or a link to one."""
    try:
        about = path.stat()
    except ValueError as error:
        raise OSError(errno.EINVAL, _NO_NAME) from error
    return _checked(about)


def _checked(about: os.stat_result, most: int | None = None) -> os.stat_result:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a file")
    if most is not None and about.st_size > most:
        raise OSError(errno.EFBIG, f"is larger than {size(most)}, the largest that sewa reads")
    return about


def open_regular(path: Path, most: int | None = None, *, whole: bool = True) -> IO[bytes]:
    """Open it to read; a pipe or device is refused, even one put there this moment.

    whole: False if only its header will be read, so that no more of a remote file is fetched.
    """
    bring(path, whole)
    check_regular(path)  # before it is opened: some devices do something then
    flags = ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")  # not every system has all
    descriptor = os.open(path, sum(getattr(os, flag, 0) for flag in flags))
    try:
        _checked(os.fstat(descriptor), most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most: int) -> bytes:
    with open_regular(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grows
        raise OSError(errno.EFBIG, f"is larger than {size(most)}, the largest that sewa reads")
    return content


def read_json(path: Path, most: int) -> Any:
    return parse_json(read_bytes(path, most))


def parse_json(text: bytes | str) -> Any:
    """Parse UTF-8 with at most DEPTH levels; a number too large for a float is Infinity."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    check_values(text)
    try:
        content = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError(f"is nested more than {DEPTH} levels deep") from None
    level = [content]
    for _ in range(DEPTH):
        nests = [one.values() if type(one) is dict else one for one in level if type(one) in _NESTS]
        level = [inner for nest in nests for inner in nest if type(inner) in _NESTS]
        if not level:
            return content
    raise ValueError(f"is nested more than {DEPTH} levels deep")


_NESTS: Final = (dict, list)


def check_values(json: bytes | str, most: int = MOST_VALUES) -> None:
    """Raise ValueError if there are too many to parse; signs within strings count too."""
    signs = ",:[{"
    if isinstance(json, str):
        count = sum(map(json.count, signs))
    else:
        count = sum(map(json.count, signs.encode()))
    if count > most:
        raise ValueError(f"has more than {most:,} values, the most that sewa reads")


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else float(digits)
