"""Which stages of a command are under way, how far they are, and how long that may still take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sewa_cli.events import Planned
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
        """`outputs 3/20`; work in one piece has its name alone."""
        if self.total == 1:
            return self.name
        return f"{self.name} {self.done}" + (f"/{self.total}" if self.total else "")

    @property
    def now(self) -> str:
        return "" if self.loss is None else f"loss {self.loss:.4f}"


class Plan:
    """Stages in their order, each with an amount of work; those that are not needed are skipped."""

    def __init__(
        self,
        stages: Sequence[Planned],
        done: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._stages = list(stages)
        self._done = done
        self._clock = clock
        self._at = 0
        self.began = self._since = clock()
        self._first = self._before = done()
        self._seconds = 0.0  # of the stages before this one that have an amount

    @property
    def name(self) -> str:
        return self._stages[self._at].name

    @property
    def place(self) -> str:
        known = sum(i <= self._at or not stage.is_rare for i, stage in enumerate(self._stages))
        return f"stage {self._at + 1} of {known}: {self.name}"

    @property
    def has_amount(self) -> bool:
        return self._stages[self._at].amount > 0

    def enter(self, name: str) -> None:
        """Go on to the next stage of this name, if there is one."""
        later = range(self._at + 1, len(self._stages))
        found = next((i for i in later if self._stages[i].name == name), None)
        if found is not None:
            self._seconds = self._working()
            del self._stages[self._at + 1 : found]  # they were not needed
            self._at, self._since, self._before = self._at + 1, self._clock(), self._done()

    def _working(self) -> float:
        """Return the seconds so far in stages that have an amount of work."""
        return self._seconds + (self._clock() - self._since) * self.has_amount

    @property
    def total(self) -> float:
        return self.done + self.left

    @property
    def done(self) -> float:
        return self._done() - self._first

    @property
    def left(self) -> float:
        """Return how much work is left."""
        here = self._stages[self._at].amount - (self._done() - self._before)
        return max(0.0, here) + self._later

    @property
    def _later(self) -> float:
        return sum(stage.amount for stage in self._stages[self._at + 1 :] if not stage.is_rare)

    @property
    def seconds_left(self) -> float | None:
        """Return what is left of it at the pace so far; None: nothing was done yet."""
        return self.left * self._working() / self.done if self.done > 0 else None


class Stages:
    """Those that have begun and not ended, each a part of the one before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest = clock()  # when anything was reported
        self._open: list[Stage] = []
        self.plan: Plan | None = None

    def follow(self, plan: Sequence[Planned], done: Callable[[], float]) -> None:
        """Take stages with these names as parts of one whole."""
        self.plan = Plan(plan, done, self._clock)

    def report(self, name: str, done: int, total: int, loss: float | None) -> Stage:
        """Take what `Events.progress` was told."""
        while self._open and self._open[-1].has_ended and self._open[-1].name != name:
            self._open.pop()
        place = next((i for i, stage in enumerate(self._open) if stage.name == name), None)
        if place is None:
            if self.plan is not None and not self._open:
                self.plan.enter(name)
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

    @property
    def left(self) -> str:
        """Say how long it may still take, where that is known."""
        here, found = self.under_way, None
        if here and here[0].done and here[0].total:
            elapsed = self._clock() - here[0].began
            found = elapsed / here[0].done * (here[0].total - here[0].done)
        if self.plan is not None:
            rest = self.plan.seconds_left
            found = rest if self.plan.has_amount or rest is None else rest + (found or 0.0)
        return "" if found is None else f"about {duration(found)} left"

    def line(self) -> str:
        """Say where the plan is, what the outermost stage has done, and the innermost."""
        here, plan = self.under_way, self.plan
        if not here:
            after = f"after {self._open[-1].count}: " if self._open else ""
            said = [f"{after}working", f"{duration(self._clock() - self._latest)} so far"]
            return ", ".join([plan.place, *said, self.left] if plan else said)
        outer, inner = here[0], here[-1]
        said = [outer.count]
        if inner is not outer:
            said[0] += f" ({inner.count})"
        if plan is not None:
            is_it = outer.name == plan.name
            said[0] = (
                plan.place + said[0].removeprefix(outer.name)
                if is_it
                else (f"{plan.place}, {said[0]}")
            )
        if outer.now:
            said.append(outer.now)
        began = outer.began if plan is None else plan.began
        said += [f"{duration(self._clock() - began)} so far", self.left]
        return ", ".join(part for part in said if part)
