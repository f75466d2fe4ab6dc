"""Notes, warnings and progress while a command works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from sewa_cli.mirrors import named

T = TypeVar("T")


class Planned(NamedTuple):
    """A stage of a plan, under the name that progress has for it."""

    name: str
    amount: float  # of work, maybe none


class Events:
    """Keep the warnings for the report, each once; the command line's subclass also prints."""

    command: str | None = None  # as it was typed, if it was
    shows_progress = False  # whether `follow` is of any use

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Record and show a warning once, however often it comes up."""
        text = named(text)
        if text not in self.warnings:
            self.warnings.append(text)
            self.show_warning(text)

    def found(self, paths: Sequence[Path]) -> None:
        """Take the checkpoints' paths before any is read; may refuse them."""

    def show_warning(self, text: str) -> None: ...

    def say(self, *lines: str) -> None: ...

    def note(self, text: str) -> None: ...

    def progress(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        """Report progress. A stage ends with `done` = `total`; a total of 0 is not known yet.

        A stage that is reported before another has ended is part of that one.
        """

    def follow(self, plan: Sequence[Planned], done: Callable[[], float]) -> None:
        """Show progress by a plan; `done` returns how much was done by now, in its unit."""

    def over(
        self, stage: str, items: Iterable[T], total: int, size: Callable[[T], int] = lambda _: 1
    ) -> Iterator[T]:
        """Yield the items and report progress; `size` is what each adds to `done`."""
        done = 0
        self.progress(stage, done, total)
        with suppress(GeneratorExit):  # the caller stopped early: the stage has ended
            for item in items:
                yield item
                done += size(item)
                if done < total or total == 0:
                    self.progress(stage, done, total)
        self.progress(stage, max(done, 1), max(done, 1))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report work in one piece."""
        self.progress(name, 0, 1)
        yield
        self.progress(name, 1, 1)
