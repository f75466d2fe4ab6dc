"""Which stages of a command are under way, how far they are, and how long that may still take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sewa_cli.events import Planned
from sewa_cli.text import duration


@dataclass
class ShownStage:
    name: str
    began: float
    done: int = 0
    total: int = 0  # 0: not known
    loss: float | None = None

    @property
    def has_ended(self) -> bool:
        return 0 < self.total <= self.done

    @property
    def count(self) -> str:
        """`outputs 3/20`; work in one piece has its name alone."""
        if self.total == 1:
            return self.name
        return f"{self.name} {self.done}" + (f"/{self.total}" if self.total else "")


class Course:
    """Stages in their order, each with an amount of work; those that are not needed are skipped."""

    def __init__(
        self, stages: Sequence[Planned], done: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._stages = list(stages)
        self._done = done
        self._clock = clock
        self._at = 0
        self.began = self._since = clock()
        self._first = self._before = done()
        self._seconds = 0.0  # of the earlier stages that have an amount

    @property
    def name(self) -> str:
        return self._stages[self._at].name

    @property
    def place(self) -> str:
        return f"stage {self._at + 1} of {len(self._stages)}: "

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
    def done(self) -> float:
        return self._done() - self._first

    @property
    def left(self) -> float:
        here = self._stages[self._at].amount - (self._done() - self._before)
        later = self._stages[self._at + 1 :]
        return max(0.0, here) + sum(stage.amount for stage in later)

    @property
    def seconds_left(self) -> float | None:
        """Return the time for the rest at the pace so far; None: nothing was done yet."""
        return self.left * self._working() / self.done if self.done > 0 else None


class Stages:
    """The stages that have begun and not ended, each a part of the one before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest = clock()  # when anything was reported
        self._open: list[ShownStage] = []
        self.plan: Course | None = None

    def follow(self, plan: Sequence[Planned], done: Callable[[], float]) -> None:
        self.plan = Course(plan, done, self._clock)

    def report(self, name: str, done: int, total: int, loss: float | None) -> ShownStage:
        while self._open and self._open[-1].has_ended and self._open[-1].name != name:
            self._open.pop()
        place = next((i for i, stage in enumerate(self._open) if stage.name == name), None)
        if place is None:
            if self.plan is not None and not self._open:
                self.plan.enter(name)
            self._open.append(ShownStage(name, self._latest))
        else:
            del self._open[place + 1 :]
        stage = self._open[-1]
        if done < stage.done:  # it begins again
            stage.began = self._latest
        stage.done, stage.total, stage.loss = done, total, loss
        self._latest = self._clock()
        return stage

    @property
    def under_way(self) -> list[ShownStage]:
        return [stage for stage in self._open if not stage.has_ended]

    @property
    def whole(self) -> tuple[float, float | None]:
        """Return how much is done of how much, by the plan or else in the outermost stage."""
        if self.plan is not None:
            return self.plan.done, self.plan.done + self.plan.left
        outer = (self.under_way or self._open)[0]
        return outer.done, outer.total or None

    @property
    def title(self) -> str:
        plan, here = self.plan, self.under_way
        name = here[0].name if here else plan.name if plan else self._open[-1].name
        return (plan.place if plan else "") + name

    @property
    def figures(self) -> list[str]:
        """The loss and the time that is left, as far as they are known."""
        here, found = self.under_way, None
        said = [f"loss {here[0].loss:.4f}"] if here and here[0].loss is not None else []
        if here and here[0].done and here[0].total:
            elapsed = self._clock() - here[0].began
            found = elapsed / here[0].done * (here[0].total - here[0].done)
        if self.plan is not None:
            rest = self.plan.seconds_left
            found = rest if self.plan.has_amount or rest is None else rest + (found or 0.0)
        return (
            [*said, f"about {duration(found)} left"] if found is not None and found >= 1 else said
        )

    def line(self) -> str:
        """Return a line for a log: the stages under way, the time so far, the figures."""
        here, plan = self.under_way, self.plan
        if here:
            what, began = here[0].count, here[0].began
            if len(here) > 1:
                what += f" ({here[-1].count})"
        else:
            after = f"after {self._open[-1].count}: " if self._open else ""
            what, began = f"{after}working", self._latest
        if plan is not None:
            what, began = plan.place + what, plan.began
        return ", ".join([what, f"{duration(self._clock() - began)} so far", *self.figures])
