"""What happens while a command works: notes, warnings, progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Events:
    """Keeps the warnings for the report, each once; the command line's own talks as well."""

    command: str | None = None  # as it was typed, if it was

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Once, however often it comes up: a checkpoint may be read again."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.show_warning(text)

    def found(self, paths: Sequence[Path]) -> None:
        """The checkpoints, before any is read; this may refuse them."""

    def show_warning(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None: ...
