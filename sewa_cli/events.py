"""Who is told of what happens."""

from __future__ import annotations


class Listener:
    """Hears what happens; this one keeps silent. `cli` has one that talks."""

    command: str | None = None  # as it was typed, if it was

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None: ...


class Heard(Listener):
    """Passes on, and keeps the warnings for the report."""

    def __init__(self, listener: Listener) -> None:
        self.warnings: list[str] = []
        self._listener = listener

    def note(self, text: str) -> None:
        self._listener.note(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self._listener.warn(text)
