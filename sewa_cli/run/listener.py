"""Who is told of what happens."""

from __future__ import annotations


class Listener:
    """Hears what happens; this one keeps silent. `cli` has one that talks."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None: ...
