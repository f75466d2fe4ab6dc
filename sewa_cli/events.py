"""What happens while a command works: notes, warnings, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Planned(NamedTuple):
    """A stage of a plan, under the name that progress reports it by."""

    name: str
    amount: float  # of work, maybe none
    is_rare: bool = False  # it counts only once it has begun


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

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        """So far. A stage ends with `done` = `total`; 0: how many there are is not known yet.

        One that is reported before another has ended is part of that.
        """

    def follow(self, plan: Sequence[Planned], done: Callable[[], float]) -> None:
        """Show progress by a plan; `done` returns how much was done by now, in its unit."""

    def over(
        self,
        stage: str,
        items: Iterable[T],
        total: int,
        size: Callable[[T], int] = lambda _: 1,
    ) -> Iterator[T]:
        """The items one by one, and progress; `size`: what each counts of the total."""
        done = 0
        self.progress(stage, done, total)
        with suppress(GeneratorExit):  # whoever takes no more of them has ended it
            for item in items:
                yield item
                done += size(item)
                if done < total or total == 0:
                    self.progress(stage, done, total)
        self.progress(stage, max(done, 1), max(done, 1))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Work in one piece."""
        self.progress(name, 0, 1)
        yield
        self.progress(name, 1, 1)
