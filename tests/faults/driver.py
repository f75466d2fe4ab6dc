"""Commands of `sewa` with faults: `Driver` asks the process of `inject.py`, which forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

INJECT = Path(__file__).with_name("inject.py")
TIMEOUT = 60  # seconds; a hang is a fault too


@dataclass(frozen=True)
class Run:
    """A command, and what shall go wrong in it."""

    argv: Sequence[str]
    cwd: str
    folder: str  # changes in it are counted
    at: int = -1  # the point at which …
    signal: int | None = None  # … this signal comes
    when: str = "before"  # or "after"
    error: int | None = None  # … the call fails, with this errno
    for_good: bool = False  # and so do all later ones that take space
    lacking: Sequence[str] = ()  # what the file system cannot do: keys of inject.LACKING
    jitter: int | None = None  # meet the other runs before publishing; go on at random speed


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: it hung
    out: str
    err: str
    points: Sequence[str]  # of each: the call, and the path in the folder

    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Driver:
    """The process that forks; `prefix`: what it runs under."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(INJECT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._process.communicate()

    def together(self, *runs: Run) -> list[Ended]:
        request = {"runs": [asdict(run) for run in runs], "timeout": TIMEOUT}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return [Ended(**answer) for answer in json.loads(self._process.stdout.readline())]

    def run(self, run: Run) -> Ended:
        return self.together(run)[0]
