"""A folder of sparse files that stand for remote ones, and what has been fetched of them.

Files that are needed whole are fetched in place and stay. Of safetensors files that do not fit,
blocks are kept instead, and the least recently used ones make room for others.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock, RLock
from typing import IO, Any, Final

import numpy as np

from sewa_cli import mirrors, ranks
from sewa_cli.checkpoints.safetensors import INDEX, MOST_HEADER, SUFFIX
from sewa_cli.config import Config
from sewa_cli.dtypes import Array
from sewa_cli.errors import CheckpointError, ConfigError, OutputError
from sewa_cli.files import MIB, real
from sewa_cli.publish import temporary
from sewa_cli.remote import hub
from sewa_cli.remote.places import check_url, failure, file_system, list_files, tag_of
from sewa_cli.text import size as size_of

_BY_CONTENT: Final = ("hf:", "s3:", "gs:")  # equal tags are equal bytes
CONNECTIONS: Final = 8
BLOCK: Final = 16 * MIB  # that one request fetches
LEAST: Final = MIB // 4
PAGE: Final = 4096
HEAD: Final = 2**16  # the first request for a header, which is rarely longer
ATTEMPTS: Final = 4
_SMALL: Final = ("trainer_state.json", "adapter_config.json", ".metadata")  # read to open a folder


@dataclass(eq=False)
class _Remote:
    """A remote file, and the jobs that fetch it."""

    url: str
    fs: Any
    place: str
    size: int
    tag: str
    head: list[Future[bytes]] = field(default_factory=list)
    whole: list[Future[bytes]] = field(default_factory=list)
    reserved: int = 0  # bytes of the folder, for what is fetched in place

    @property
    def on_hub(self) -> bool:
        return self.url.startswith("hf:")


class ScratchFolder:
    """Holds at most `most` bytes of what it fetches; None: half of what is free on the disk."""

    def __init__(self, parent: Path, most: int | None) -> None:
        self.asked = parent, most
        self._folder = temporary(parent, is_folder=True)
        self.root = real(self._folder.__enter__())
        self.most = shutil.disk_usage(parent).free // 2 if most is None else most
        self._files: dict[Path, _Remote] = {}
        self._places: dict[str, tuple[Any, str, Path]] = {}  # URL → what is listed, and to where
        self.outputs: dict[Path, tuple[Any, str]] = {}
        self._blocks: OrderedDict[tuple[Path, int], tuple[Future[Path], int]] = OrderedDict()
        self._block = BLOCK
        self._ahead = CONNECTIONS  # blocks of a file that are fetched together
        self._used = 0  # bytes of headers, whole files and blocks
        self._order: list[Path] = []  # of files that are about to be read whole
        self._lock, self._asking = RLock(), Lock()
        self._pool = ThreadPoolExecutor(CONNECTIONS, "fetch")
        self._listed = self._fetched = 0.0  # when each was last done
        mirrors.OPEN[str(self.root)] = self

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.__exit__(None, None, None)

    # ---- listings ----------------------------------------------------------------------------

    def add(self, url: str) -> Path:
        """List a file or folder; return where it is in this folder. Headers are fetched."""
        local, fs, place = self._find(url)
        try:
            cached = hub.cached_folder(place) if url.startswith("hf:") else None
        except Exception as error:
            raise failure(url, error) from error
        if cached is not None:
            _link_all(cached, local)
            return local
        if url.endswith(INDEX):  # with the files that it names
            self._places[url] = fs, place.rpartition("/")[0], local.parent
        else:
            self._places[url] = fs, place, local
        self._list(url)
        if not (local.is_dir() or local in self._files):
            raise CheckpointError(f"{url}: no such file or folder")
        return local

    def add_output(self, url: str) -> Path:
        """Return where an output is made; what is there already, and next to it, is listed."""
        url = url.rstrip("/")
        local, fs, place = self._find(url)
        parent, _, name = place.rpartition("/")
        if not parent or not name:
            raise ConfigError(f"{url}: names a bucket; name a file or folder in it")
        self.outputs[local] = fs, place
        try:
            fs.invalidate_cache()
            is_new = not fs.exists(parent)
            beside = [] if is_new else fs.ls(parent, detail=True)
            if is_new and not fs.exists(parent.partition("/")[0]):
                raise FileNotFoundError
        except Exception as error:
            raise failure(url.rpartition("/")[0], error, OutputError) from error
        for info in beside:
            file = info["name"].rstrip("/").rpartition("/")[2]
            if info["type"] == "file" and file not in ("", ".", ".."):
                self._note(fs, f"{parent}/{file}", local.with_name(file), info)
            elif info["type"] == "directory" and file == name:
                self._places[url] = fs, place, local
                self._list(url)
        local.parent.mkdir(parents=True, exist_ok=True)
        return local

    def _find(self, url: str) -> tuple[Path, Any, str]:
        check_url(url)
        scheme, _, rest = url.partition("://")
        return self.root / f"{scheme}:" / rest, *file_system(url)

    def give_up(self, path: Path) -> list[str]:
        """Forget remote files, as local ones are in their place; return where they are."""
        paths = [known for known in self._files if known == path or path in known.parents]
        return [self._files.pop(known).place for known in paths]

    def removed(self, folder: Path) -> list[str]:
        """Return the remote files in a folder whose local ones sewa has removed."""
        gone = [path for path in self._files if path.parent == folder and not path.exists()]
        return [self._files[path].place for path in gone]

    def _list(self, url: str) -> None:
        fs, place, local = self._places[url]
        self._listed = time.monotonic()
        try:
            found = _retried(fs, lambda: list_files(fs, place))
        except FileNotFoundError:
            found = {}
        except Exception as error:
            raise failure(url, error) from error
        with self._lock:
            inside = {path for path in self._files if path == local or local in path.parents}
            for path in inside - {local / name for name in found}:
                self._forget(path)
            for name, info in found.items():
                self._note(fs, f"{place}/{name}".rstrip("/"), local / name, info)
        heads = [path for name in found if _is_read_to_open(path := local / name)]
        for job in [job for path in heads for job in self._begin(path, whole=False)]:
            job.result()

    def _note(self, fs: Any, place: str, path: Path, info: dict[str, Any]) -> None:
        size, tag, url = info["size"], tag_of(info), mirrors.named(path)
        if not url.startswith(_BY_CONTENT):
            tag = f"{tag} {url}"
        known = self._files.get(path)
        if known is not None and (known.size, known.tag) == (size, tag):
            return
        self._forget(path)
        if size is None:
            raise CheckpointError(f"{url}: its server does not say how large it is; download it")
        with writing(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
        self._files[path] = _Remote(url, fs, place, size, tag)

    def _forget(self, path: Path) -> None:
        """The remote file is gone or another one; what is mapped of the old one stays readable."""
        if (known := self._files.pop(path, None)) is not None:
            self._used -= known.reserved
        for key in [key for key in self._blocks if key[0] == path]:
            self._drop(key)
        path.unlink(missing_ok=True)

    def stamp(self, path: Path, fresh: bool) -> tuple[int, int] | None:
        with self._asking:
            if fresh and self._listed <= self._fetched:
                with ThreadPoolExecutor(CONNECTIONS) as pool:
                    list(pool.map(self._list, self._places))
        if (known := self._files.get(path)) is None:
            return None
        return known.size, int.from_bytes(sha256(known.tag.encode()).digest()[:8])

    # ---- whole files -------------------------------------------------------------------------

    def bring(self, path: Path, whole: bool) -> None:
        for job in self._begin(path, whole):
            job.result()

    def is_whole(self, path: Path) -> bool:
        known = self._files.get(path)
        return known is None or known.on_hub or bool(known.whole) or path in self._order

    def expect(self, files: Sequence[Path]) -> None:
        """Take note of files that will be read whole, probably in this order."""
        self._order = list(files)

    def fits(self, files: Sequence[Path]) -> bool:
        """Whether all that is still to be fetched of these files has room."""
        known = [self._files[path] for path in files]
        missing = sum(one.size - one.reserved for one in known if not one.whole and not one.on_hub)
        return missing + self._used - sum(size for _, size in self._blocks.values()) <= self.most

    def can_stream(self, path: Path) -> bool:
        known = self._files[path]
        return path.suffix == SUFFIX and not known.whole and not known.on_hub

    def holds(self, path: Path) -> bool:
        return path in self._files

    def _begin(self, path: Path, whole: bool, ahead: bool = True) -> list[Future[bytes]]:
        with self._lock:
            if (known := self._files.get(path)) is None:
                return []
            if not whole and path.suffix == SUFFIX and known.size > HEAD:
                if not known.head:
                    self._reserve(known, min(HEAD, known.size))
                    known.head = [self._pool.submit(self._fetch_head, path, known)]
                return known.head
            if not known.whole and known.on_hub:
                known.whole = [self._pool.submit(self._fetch_from_hub, path, known)]
            elif not known.whole:
                self._reserve(known, known.size)
                starts = range(HEAD if known.head else 0, known.size, BLOCK)
                spans = [(start, min(start + BLOCK, known.size)) for start in starts]
                jobs = [self._pool.submit(self._put, path, known, *span) for span in spans]
                known.whole = known.head + jobs
            if ahead and path in self._order[1:]:  # the second of those to be read: go on
                at = self._order.index(path)
                for other in self._order[at + 1 : at + CONNECTIONS]:
                    self._begin(other, whole=True, ahead=False)
            return known.whole

    def _fetch_head(self, path: Path, known: _Remote) -> bytes:
        end = min(HEAD, known.size)
        start = self._put(path, known, 0, end)
        length = 8 + int.from_bytes(start[:8], "little")
        if end < length <= min(known.size, MOST_HEADER):
            self._put(path, known, end, length)
        return start

    def _put(self, path: Path, known: _Remote, start: int, end: int) -> bytes:
        data = self._get(known, start, end)
        with writing(self.root), path.open("r+b") as file:
            file.seek(start)
            file.write(data)
        return data

    def _fetch_from_hub(self, path: Path, known: _Remote) -> bytes:
        try:
            found = hub.download(known.fs, known.place)
        except Exception as error:
            raise failure(known.url, error) from error
        finally:
            self._fetched = time.monotonic()
        if found.stat().st_size != known.size:
            raise _changed(known)
        path.unlink()
        path.symlink_to(found)
        return b""

    def _get(self, known: _Remote, start: int, end: int) -> bytes:
        try:
            data: bytes = _retried(known.fs, lambda: _read(known, start, end))
        except Exception as error:
            raise failure(known.url, error) from error
        finally:
            self._fetched = time.monotonic()
        if len(data) > end - start:
            raise CheckpointError(f"{known.url}: its server sends whole files only; download it")
        if len(data) < end - start:
            raise _changed(known)
        return data

    def _reserve(self, known: _Remote, size: int) -> None:
        self._take(size - known.reserved)
        known.reserved = size

    # ---- blocks ------------------------------------------------------------------------------

    def divide(self, files: int) -> int:
        """Choose the size of blocks so that four of each file fit; return an eighth of it.

        Windows of that size, one after the other for each of several threads, are in few blocks.
        """
        with self._lock:
            for key in list(self._blocks):
                self._drop(key)
            block = (self.most - self._used) // (4 * files) // PAGE * PAGE
            self._block = max(LEAST, min(BLOCK, block))
            self._ahead = min(CONNECTIONS, 2 * files)
        return self._block // 8

    def begin(self, path: Path, start: int, stop: int) -> range:
        """Begin to fetch the blocks of a part of a file, and the one after it."""
        count = -(-self._files[path].size // self._block)
        numbers = range(start // self._block, -(-stop // self._block))
        for n in range(numbers.start, min(numbers.stop + 1, count))[: self._ahead]:
            self._fetch_block(path, n)
        return numbers

    def read(self, path: Path, start: int, stop: int) -> Iterator[Array]:
        """Yield the bytes of a part of a file, which is not fetched whole."""
        for n in self.begin(path, start, stop):
            first = n * self._block
            begin, end = max(start, first), min(stop, first + self._block)
            self.begin(path, begin, stop)
            with self._open_block(path, n) as file:
                yield np.fromfile(file, np.uint8, end - begin, offset=begin - first)

    def blocks(self, path: Path) -> Iterator[Array]:
        return self.read(path, 0, self._files[path].size)

    def _open_block(self, path: Path, n: int) -> IO[bytes]:
        while True:
            with suppress(FileNotFoundError):  # another thread has dropped it meanwhile
                return self._fetch_block(path, n).result().open("rb", buffering=0)

    def _fetch_block(self, path: Path, n: int) -> Future[Path]:
        with self._lock:
            if (path, n) in self._blocks:
                self._blocks.move_to_end((path, n))
                return self._blocks[path, n][0]
            known, start = self._files[path], n * self._block
            end = min(start + self._block, known.size)
            size = -(-(end - start) // PAGE) * PAGE  # on the disk
            self._take(size)
            job = self._pool.submit(self._keep_block, known, start, end)
            self._blocks[path, n] = job, size
            return job

    def _keep_block(self, known: _Remote, start: int, end: int) -> Path:
        file = self.root / f"{id(known):x}-{start:x}"
        data = self._get(known, start, end)
        with writing(self.root):
            file.write_bytes(data)
        return file

    def _take(self, size: int) -> None:
        """Reserve room; drop blocks for it, the least recently used first."""
        while self._used + size > self.most and self._blocks:
            self._drop(next(iter(self._blocks)))
        if self._used + size > self.most:
            raise CheckpointError(
                f"--scratch-size: {size_of(self.most)} is too little for these checkpoints; allow "
                "more, or name fewer"
            )
        self._used += size

    def _drop(self, key: tuple[Path, int]) -> None:
        job, size = self._blocks.pop(key)
        self._used -= size
        with suppress(Exception):  # a failed fetch is reported where it is waited for
            job.result().unlink()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"--scratch: {folder.parent}: {error.strerror or error}") from error


def _is_read_to_open(path: Path) -> bool:
    return path.suffix == SUFFIX or path.name in _SMALL or path.name.endswith(INDEX)


def _link_all(cached: Path, local: Path) -> None:
    for folder, _, names in os.walk(cached):
        place = local / Path(folder).relative_to(cached)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (place / name).is_symlink():
                (place / name).symlink_to(real(Path(folder, name)))


def _read(known: _Remote, start: int, end: int) -> Any:
    options = {"cache_type": "none"} if known.on_hub else {}
    return known.fs.cat_file(known.place, start=start, end=end, **options)


def _retried(fs: Any, call: Callable[[], Any]) -> Any:
    """Call again where it failed for a while; libraries of object stores do so themselves."""
    attempts = ATTEMPTS if "https" in fs.protocol or "sftp" in fs.protocol else 1
    for attempt in range(attempts):
        try:
            return call()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception:
            if attempt == attempts - 1:
                raise
            time.sleep(0.25 * 4**attempt)
    return None


def _changed(known: _Remote) -> CheckpointError:
    return CheckpointError(
        f"{known.url}: changed while it was being read; try again when nothing writes to it"
    )


def scratch_for(folder: Path | None, most: int | None) -> ScratchFolder:
    """Return the folder that this command uses, made at its first remote file."""
    parent = real(folder or Path(tempfile.gettempdir()))
    for mirror in mirrors.OPEN.values():
        if isinstance(mirror, ScratchFolder) and mirror.asked == (parent, most):
            return mirror
    if not parent.is_dir():
        raise ConfigError(f"--scratch: {parent}: no such folder; make it first")
    atexit.register(mirrors.close)  # where no command line does
    return ScratchFolder(parent, most)


def local_paths(config: Config) -> tuple[Path, ...]:
    """Return the config's checkpoints, with a local folder or file for each that is remote."""
    urls = {path: url for path in config.checkpoints if (url := mirrors.url_of(path)) is not None}
    if config.revisions is not None and not any(url.startswith("hf:") for url in urls.values()):
        raise ConfigError("--revisions: is for checkpoints on the hub, hf://ORGANISATION/NAME")
    if not urls:
        return config.checkpoints
    if ranks.here().several:
        raise ConfigError(f"{next(iter(urls.values()))}: torchrun needs local checkpoints")
    scratch = scratch_for(config.scratch, config.scratch_size)
    found: list[Path] = []
    for path in config.checkpoints:
        if path not in urls:
            found.append(path)
        elif config.revisions is None or not urls[path].startswith("hf:"):
            found.append(scratch.add(urls[path]))
        else:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                found += pool.map(scratch.add, hub.revisions(urls[path], config.revisions))
    return tuple(found)


def local_path(path: Path, *, beside: bool = False) -> Path:
    """Return a local folder or file for a place that may be remote.

    beside: list the files in the same folder too, which may be its report or output.
    """
    if (url := mirrors.url_of(path)) is None:
        return path
    scratch = scratch_for(None, None)
    if beside:
        scratch.add_output(url)
    return scratch.add(url)
