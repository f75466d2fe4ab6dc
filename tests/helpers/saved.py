"""Reading back what a callback saved."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def steps(folder: Path) -> list[int]:
    assert not list(folder.glob(".*")), "something half-written is left"
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.iterdir())
