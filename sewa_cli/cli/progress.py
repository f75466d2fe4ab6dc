"""Which stages of a command are under way, how far they are, and how long that may still take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sewa_cli.text import duration


@dataclass
class Stage:
    name: str
    began: float
    depth: int  # of how many others it is a part
    done: int = 0
    total: int = 0  # 0: not known
    loss: float | None = None
    rounds: int = 1  # it may be gone through again and again

    @property
    def has_ended(self) -> bool:
        return 0 < self.total <= self.done

    @property
    def count(self) -> str:
        """`surveying 3/20`; work in one piece has its name alone."""
        if self.total == 1:
            return self.name
        return f"{self.name} {self.done}" + (f"/{self.total}" if self.total else "")

    @property
    def now(self) -> str:
        return "" if self.loss is None else f"loss {self.loss:.4f}"


class Stages:
    """Those that have begun and not ended, each a part of the one before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest = clock()  # when anything was reported
        self._open: list[Stage] = []

    def report(self, name: str, done: int, total: int, loss: float | None) -> Stage:
        """What `Events.progress` was told."""
        while self._open and self._open[-1].has_ended and self._open[-1].name != name:
            self._open.pop()
        place = next((i for i, stage in enumerate(self._open) if stage.name == name), None)
        if place is None:
            self._open.append(Stage(name, self._latest, len(self._open)))
        else:
            del self._open[place + 1 :]
        stage = self._open[-1]
        if done < stage.done:  # once more
            stage.began, stage.rounds = self._latest, stage.rounds + 1
        stage.done, stage.total, stage.loss = done, total, loss
        self._latest = self._clock()
        return stage

    @property
    def under_way(self) -> list[Stage]:
        return [stage for stage in self._open if not stage.has_ended]

    def line(self) -> str:
        """The outermost with what is left of it, and the innermost."""
        here = self.under_way
        if not here:
            after = f"after {self._open[-1].count}: " if self._open else ""
            return f"{after}working, {duration(self._clock() - self._latest)} so far"
        outer, inner = here[0], here[-1]
        elapsed = self._clock() - outer.began
        said = [outer.count, f"{duration(elapsed)} so far"]
        if inner is not outer:
            said[0] += f" ({inner.count})"
        if outer.now:
            said.insert(1, outer.now)
        if outer.done and outer.total:
            left = elapsed / outer.done * (outer.total - outer.done)
            said.append(f"about {duration(left)} left")
        return ", ".join(said)
