"""Helpers of the benchmarks: timing in turns, and tables.

The machine may be busy with other things, so contestants take turns and the best time of each
counts: noise only ever adds.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def race(contestants: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Best seconds of each, taking turns; one round to warm up."""
    best = dict.fromkeys(contestants, float("inf"))
    for turn in range(rounds + 1):
        for name, work in contestants.items():
            start = time.perf_counter()
            work()
            if turn > 0:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def processor() -> str:
    """Its name, for the head of a table: limits are a matter of the machine."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def as_installed() -> dict[str, str]:
    """The environment, but commands may keep bytecode, as pip does for what it installs."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


@contextmanager
def timed(
    owner: Any, name: str, spent: dict[str, float], part: str, running: list[str] | None = None
) -> Iterator[None]:
    """Adds the seconds in owner.name to spent[part].

    Parts that share a list `running` may call each other: the outermost gets the time.
    """
    plain: Callable[..., Any] = getattr(owner, name)
    running = [] if running is None else running

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if running:
            return plain(*arguments, **named)
        running.append(part)
        start = time.perf_counter()
        try:
            return plain(*arguments, **named)
        finally:
            running.pop()
            spent[part] += time.perf_counter() - start

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[show(row[column]) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def finish(name: str, rows: Sequence[Mapping[str, object]], path: str | None) -> None:
    print(markdown(rows), flush=True)
    if path is not None:
        Path(path).write_text(json.dumps({"benchmark": name, "rows": list(rows)}, indent=2) + "\n")
