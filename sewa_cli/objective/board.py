"""A metric as a function of weights: losses of averages, part by part, within a budget.

Whoever searches asks for an average on some parts and is told a loss for each: the score itself
where low is good, its negative where high is. What was asked before is known and costs nothing.
When the budget has ended, or the user has had enough (Ctrl-C), `ask` raises `Spent`; all that was
found until then is on the board.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from sewa_cli import interrupts
from sewa_cli.errors import TaskError
from sewa_cli.events import Events

Average = tuple[float, ...]  # coefficients; the key of everything here
TOLD = 3  # failures that are told one by one
HOPELESS = 4  # calls that fail before the first that does not, whatever part and checkpoint


class Spent(Exception):
    """The budget has ended."""


class Failed(NamedTuple):
    """Why a part has no score."""

    line: str
    is_task: bool = False  # no part will ever have one


class Asked(NamedTuple):
    average: Average
    parts: tuple[int, ...]

    def one_by_one(self) -> list[Asked]:
        return [Asked(self.average, (part,)) for part in self.parts]


Answer = list[float] | Failed  # a loss for each part
Evaluate = Callable[[Sequence[Asked], float | None], Iterator[tuple[int, Answer]]]


@dataclass
class Board:
    """parts     how many there are to choose by; they are asked for by number
    weights   [parts] what each counts in a mean
    evaluate  the pieces, in the order in which they finish; a piece at a time may have several
              parts of one average. It ends when the clock shows the second argument
    at_once   parts in a piece
    abreast   parts that are under way at the same time, by all workers together
    """

    parts: int
    evaluate: Evaluate
    events: Events
    weights: Tensor
    evaluations: int | None = None  # the budget; None: only time counts
    seconds: float | None = None
    at_once: int = 1
    abreast: int = 1
    found: dict[Average, dict[int, float]] = field(default_factory=dict)
    numbers: Sequence[int] = ()  # what the task calls the parts: places in its own list
    _scored: set[int] = field(default_factory=set)  # parts that somebody has a score for
    _failed: dict[int, set[Average]] = field(default_factory=dict)
    _in_vain: list[tuple[Asked, str]] = field(default_factory=list)  # calls, and why
    _range: tuple[float, float] = (inf, -inf)  # of all losses
    spent: int = 0
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    began: float | None = None
    took: float = 0.0  # seconds in which something was evaluated
    _timed_from: int = 0  # evaluations before those

    # ---- the budget -----------------------------------------------------------------------------

    @property
    def until(self) -> float | None:
        if self.seconds is None:
            return None
        return self.seconds + (time.monotonic() if self.began is None else self.began)

    @property
    def left(self) -> int:
        """Evaluations; where the clock decides, as many as there will be time for."""
        if self.interrupted:
            return 0
        if self.evaluations is not None:
            return self.evaluations - self.spent
        assert self.until is not None
        timed = self.spent - self._timed_from
        per_second = timed / self.took if self.took > 0 and timed > 0 else 1.0
        return max(0, int((self.until - time.monotonic()) * per_second))

    @property
    def total(self) -> int:
        return self.evaluations if self.evaluations is not None else self.spent + self.left

    # ---- asking ---------------------------------------------------------------------------------

    def ask(self, wanted: Iterable[tuple[Average, Iterable[int]]]) -> None:
        """Brings them onto the board. `Spent`: not all; as many of the first as could be."""
        pieces = list(self._pieces(wanted))
        if not pieces:
            return
        if self.interrupted:
            raise Spent
        began = time.monotonic()
        self.began = began if self.began is None else self.began
        try:
            singly = self._evaluate(self._affordable(pieces))
            self._evaluate(self._affordable(singly))
        except KeyboardInterrupt:
            if not interrupts.forgive():
                raise
            self.interrupted = True
            self.events.warn(
                f"interrupted: the choice is made by the {self.spent} evaluations so far "
                "(Ctrl-C again ends it all)"
            )
        self.took += time.monotonic() - began
        if any(
            part not in self.found.get(piece.average, {})
            for piece in pieces
            for part in piece.parts
        ):
            raise Spent

    def forget_pace(self) -> None:
        """What was asked so far says nothing of how long the next will take."""
        self.took, self._timed_from = 0.0, self.spent

    def _evaluate(self, asked: Sequence[Asked]) -> list[Asked]:
        """What is to be asked part by part: some of several that were asked at once has failed."""
        singly = []
        for place, answer in self.evaluate(asked, self.until):
            piece = asked[place]
            is_to_blame = self._always_fails(piece.average) or len(piece.parts) == 1
            if isinstance(answer, Failed) and not answer.is_task and not is_to_blame:
                self.spent += len(piece.parts)  # they were evaluated, if in vain
                singly += piece.one_by_one()
                self._despair(piece, answer)
            else:
                self._write(piece, answer)
        return singly

    def _always_fails(self, average: Average) -> bool:
        """Then which of the parts it was that failed need not be found out."""
        row = self.found.get(average, {})
        return len(row) >= HOPELESS and all(loss == inf for loss in row.values())

    def _pieces(self, wanted: Iterable[tuple[Average, Iterable[int]]]) -> Iterator[Asked]:
        """What is not known yet, each once."""
        asked: set[tuple[Average, int]] = set()
        bad = self.bad
        for average, parts in wanted:
            known = self.found.get(average, {})
            fresh = [
                part
                for part in dict.fromkeys(parts)
                if part not in known and part not in bad and (average, part) not in asked
            ]
            asked |= {(average, part) for part in fresh}
            for start in range(0, len(fresh), self.at_once):
                yield Asked(average, tuple(fresh[start : start + self.at_once]))

    def _affordable(self, pieces: Sequence[Asked]) -> list[Asked]:
        if self.evaluations is None:
            return list(pieces)
        taken, left = [], self.evaluations - self.spent
        for piece in pieces:
            if left <= 0:
                break
            taken.append(Asked(piece.average, piece.parts[:left]))
            left -= len(piece.parts)
        return taken

    def _write(self, asked: Asked, answer: Answer) -> None:
        self.spent += len(asked.parts)
        row = self.found.setdefault(asked.average, {})
        if isinstance(answer, Failed):
            self._fail(asked, answer)
        else:
            row |= dict(zip(asked.parts, answer, strict=True))
            known = {p: row[p] for p in asked.parts if isfinite(row[p])}
            self._scored |= known.keys()
            low, high = self._range
            self._range = min([low, *known.values()]), max([high, *known.values()])
            if broken := tuple(p for p in asked.parts if p not in known):
                self._fail(Asked(asked.average, broken), Failed("its score is NaN or Inf"))
        self.events.progress("evaluating parts", self.spent, self.evaluations or 0)

    def _fail(self, asked: Asked, why: Failed) -> None:
        """Told; an average with a failure is behind all others there, unless the part is bad."""
        if why.is_task:
            raise TaskError(why.line)
        for part in asked.parts:
            self.found[asked.average][part] = inf
            self._failed.setdefault(part, set()).add(asked.average)
            self.failures.append(f"part {self._name(part)}: {why.line}")
            if len(self.failures) <= TOLD:
                self.events.warn(f"part {self._name(part)} has failed: {why.line}")
        self._despair(asked, why)

    def _name(self, part: int) -> int:
        return self.numbers[part] if self.numbers else part

    def _despair(self, asked: Asked, why: Failed) -> None:
        """If nothing but failures has come so far, there is no use in going on.

        Unless one part is to blame, or one checkpoint that is in all that were asked.
        """
        self._in_vain.append((asked, why.line))
        parts = {one.parts for one, _ in self._in_vain}
        weights = zip(*(one.average for one, _ in self._in_vain), strict=True)
        if (
            len(self._in_vain) >= HOPELESS
            and len(parts) >= min(2, self.parts)
            and not any(all(column) for column in weights)
        ):
            self.check()

    def check(self) -> None:
        """Whether there is any score at all, of all that was tried."""
        if self._in_vain and not self.has_scores:
            asked, line = self._in_vain[0]
            raise TaskError(f"no part could be scored; part {self._name(asked.parts[0])}: {line}")

    @property
    def bad(self) -> set[int]:
        """Parts that fail for all who come to them: no average is to blame."""
        return {
            part for part, who in self._failed.items() if part not in self._scored and len(who) > 1
        }

    # ---- what is on it --------------------------------------------------------------------------

    def parts_of(self, average: Average) -> list[int]:
        bad = self.bad
        row = self.found.get(average, {})  # in the order in which they came: not for sums
        return sorted(part for part in row if part not in bad)

    @property
    def has_scores(self) -> bool:
        return bool(self._scored)

    def has_failed(self, average: Average) -> bool:
        """On a part that others have a score for."""
        return any(self.found[average][part] == inf for part in self.parts_of(average))

    def losses(self, average: Average, parts: Sequence[int]) -> Tensor:
        """On parts that it was asked on. A failure is worse than all that did not fail."""
        row, (low, high) = self.found.get(average, {}), self._range
        worst = high + (high - low or abs(high) or 1.0)
        found = [worst if row[part] == inf else row[part] for part in parts]
        return torch.tensor(found, dtype=torch.float64)

    def mean(self, average: Average, parts: Sequence[int] | None = None) -> float:
        """Over these parts, or all that it was asked on; inf: there are none."""
        some = self.parts_of(average) if parts is None else parts
        if not some:
            return inf
        weights = self.weights[list(some)]
        return float(self.losses(average, some) @ (weights / weights.sum()))

    def differences(self, one: Average, two: Average, parts: Sequence[int]) -> Tensor:
        """one − two on parts that both have."""
        difference = self.losses(one, parts) - self.losses(two, parts)
        return difference * (self.weights[list(parts)] / self.weights.mean())
