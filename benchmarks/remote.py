"""Average a run on an object store, next to downloading it: `python benchmarks/remote.py`.

The store is a small S3 server in a process of its own, which sends files from the page cache:
moto's reads a whole object for each range. The run's files are links to ten.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from common import finish
from safetensors.numpy import save_file

from sewa_cli.remote.scratch import CONNECTIONS

SERVER = """
import os, re, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit, parse_qs

folder = sys.argv[1]
ENTRY = '<Contents><Key>run/{0}</Key><Size>{1}</Size><ETag>"{0}"</ETag>' \\
    '<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_): ...

    def do_GET(self):
        path = urlsplit(self.path).path
        name = path.removeprefix("/bucket/run/")
        if "list-type" in self.path:
            names = sorted(os.listdir(folder))
            entries = [ENTRY.format(n, os.stat(os.path.join(folder, n)).st_size) for n in names]
            text = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">' \\
                '<IsTruncated>false</IsTruncated>' + "".join(entries) + "</ListBucketResult>"
            self.answer(200, len(text))
            self.wfile.write(text.encode())
            return
        with open(os.path.join(folder, name), "rb") as file:
            start, size, status = 0, os.fstat(file.fileno()).st_size, 200
            if span := re.fullmatch("bytes=([0-9]+)-([0-9]+)", self.headers.get("Range", "")):
                start, status = int(span[1]), 206
                size = int(span[2]) + 1 - start
            self.answer(status, size, name)
            while size > 0:
                sent = os.sendfile(self.wfile.fileno(), file.fileno(), start, size)
                start, size = start + sent, size - sent

    def answer(self, status, size, name="x"):
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", f'"{name}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()

    def do_HEAD(self):
        name = urlsplit(self.path).path.removeprefix("/bucket/run/")
        with open(os.path.join(folder, name), "rb") as file:
            self.answer(200, os.fstat(file.fileno()).st_size, name)

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
TENSORS = 24
KEPT = 10  # files on the disk
MEGABYTE = 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=100, help="of each checkpoint")
    parser.add_argument(
        "--share", type=float, default=0.25, help="of the run that the scratch holds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sewa-remote-") as name:
        folder = Path(name)
        (folder / "run").mkdir()
        fill(folder, given.checkpoints, given.megabytes)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder / "run")], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
        }
        try:
            total = given.checkpoints * given.megabytes * MEGABYTE
            finish(
                "remote", measure(folder, total, int(given.share * total), given.rounds), given.json
            )
        finally:
            server.kill()


def fill(folder: Path, count: int, megabytes: int) -> None:
    numbers = np.random.default_rng(0).standard_normal(
        megabytes * MEGABYTE // 4 // TENSORS, np.float32
    )
    for step in range(count):
        file = folder / "run" / f"step-{step}.safetensors"
        if step < KEPT:
            save_file({f"layer.{n:02d}": numbers + step for n in range(TENSORS)}, file)
        else:
            file.hardlink_to(folder / "run" / f"step-{step % KEPT}.safetensors")


def measure(folder: Path, total: int, cap: int, rounds: int) -> list[dict[str, object]]:
    """Time each in turn, and keep the best of each."""
    caps = {"average, all of it fits": 4 * total, "average, streamed": cap}
    seconds: dict[str, list[float]] = {"download": [], **{name: [] for name in caps}}
    most = dict.fromkeys(seconds, 0)
    for _ in range(rounds):
        start = time.perf_counter()
        download(folder / "plain")
        seconds["download"].append(time.perf_counter() - start)
        shutil.rmtree(folder / "plain")
        for name, size in caps.items():
            start = time.perf_counter()
            most[name] = max(most[name], average(folder, size))
            seconds[name].append(time.perf_counter() - start)
    best = min(seconds["download"])
    return [
        {
            "what": name,
            "seconds": min(found),
            "/ download": min(found) / best,
            "scratch, MB": most[name] / MEGABYTE,
            "its cap, MB": caps.get(name, 0) / MEGABYTE,
        }
        for name, found in seconds.items()
    ]


def download(into: Path) -> None:
    """Download as s3fs does it, with as many connections as sewa has."""
    get = f"get('bucket/run', {str(into)!r}, recursive=True, batch_size={CONNECTIONS})"
    code = f"import s3fs; s3fs.S3FileSystem().{get}"
    subprocess.run([sys.executable, "-c", code], check=True)


def average(folder: Path, cap: int) -> int:
    """Return the most bytes that the scratch folder had on the disk."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "sewa_cli", "average", "s3://bucket/run", "--force", "-q"]
    command += ["-o", str(folder / "out.safetensors"), "--scratch", str(scratch)]
    running = subprocess.Popen([*command, "--scratch-size", str(cap)], stdout=subprocess.DEVNULL)
    most = 0
    while running.poll() is None:
        most = max(most, held(scratch))
        time.sleep(0.1)
    if running.returncode:
        raise SystemExit("sewa average has failed")
    return most


def held(folder: Path) -> int:
    """Return the bytes of the disk that are taken; files come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).lstat().st_blocks * 512
    return total


if __name__ == "__main__":
    main()
