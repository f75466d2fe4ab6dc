"""Scores of averages, part by part, within an evaluation budget.

A solver asks for an average on some parts. What was asked before is known and costs nothing. When
the budget has ended, or the user has pressed Ctrl-C, `ask` raises `Spent`; all that was found
until then is on the board.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import NamedTuple

from torch import Tensor

from sewa_cli import interrupts
from sewa_cli.direction import Criterion, Sums
from sewa_cli.errors import TaskError
from sewa_cli.events import Events
from sewa_cli.stats import unit_scores

Average = tuple[float, ...]  # coefficients; the key of everything here
REPORTED = 3  # failures that are reported one by one
MOST_FAILURES = 4  # calls that fail before the first that does not, whatever part and checkpoint


class Spent(Exception):
    """The budget has ended."""


def is_known(score: float | Sums) -> bool:
    return all(map(isfinite, score)) if isinstance(score, tuple) else isfinite(score)


class Failed(NamedTuple):
    """Why a call has no scores. `is_final`: no part will ever have one."""

    line: str
    is_final: bool = False


class Asked(NamedTuple):
    """A call: one average on some parts."""

    average: Average
    parts: tuple[int, ...]

    def one_by_one(self) -> list[Asked]:
        return [Asked(self.average, (part,)) for part in self.parts]


Answer = list[float | Sums] | Failed  # a score for each part, or what it adds to one
Evaluate = Callable[[Sequence[Asked], float | None], Iterator[tuple[int, Answer]]]


@dataclass
class Board:
    """criterion    which way scores are better
    weights      [parts] what each part counts in a mean
    evaluate     yields the answers to calls, by their places, as they finish; it ends when the
                 clock is past its second argument
    evaluations  the budget; None: `seconds` is
    at_once      parts in a call
    abreast      parts that are under way at the same time, in all processes
    whole        a call has all parts of an average, and is one evaluation
    stop_after   failures in a row that end it, if they share no checkpoint
    name_of      names a part in messages
    corpus       makes the score of sums over parts
    """

    criterion: Criterion
    weights: Tensor
    evaluate: Evaluate
    events: Events
    evaluations: int | None = None
    seconds: float | None = None
    at_once: int = 1
    abreast: int = 1
    whole: bool = False
    stop_after: int | None = None
    name_of: Callable[[int], object] = int
    corpus: Callable[[Sums], float] | None = None
    found: dict[Average, dict[int, float | Sums]] = field(default_factory=dict)  # NaN: has failed
    failures: list[str] = field(default_factory=list)
    spent: int = 0
    interrupted: bool = False
    stopped: str | None = None  # why it was, before the budget ended
    _scored: set[int] = field(default_factory=set)  # parts that any average has a score on
    _failed: dict[int, set[Average]] = field(default_factory=dict)
    _failed_calls: list[tuple[Asked, str]] = field(default_factory=list)
    _in_a_row: list[Asked] = field(default_factory=list)  # those that failed, the last time
    _proven: set[int] = field(default_factory=set)  # checkpoints in averages that have a score
    _range: tuple[float, float] = (inf, -inf)  # of all scores
    _began: float | None = None
    _pace: float = 1.0  # evaluations in a second, the last time

    # ---- the budget -----------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        return len(self.weights)

    @property
    def _until(self) -> float | None:
        if self.seconds is None:
            return None
        return self.seconds + (time.monotonic() if self._began is None else self._began)

    @property
    def left(self) -> int:
        """Return evaluations; of a budget in seconds, as many as there will be time for."""
        if self.interrupted or self.stopped:
            return 0
        if self.evaluations is not None:
            return self.evaluations - self.spent
        assert self._until is not None
        return max(0, int((self._until - time.monotonic()) * self._pace))

    @property
    def total(self) -> int:
        return self.evaluations if self.evaluations is not None else self.spent + self.left

    # ---- asking ---------------------------------------------------------------------------------

    def ask(self, wanted: Iterable[tuple[Average, Iterable[int]]]) -> None:
        """Have averages scored on parts. `Spent`: only the first of them were."""
        calls = list(self._new(wanted))
        if not calls:
            return
        if self.interrupted or self.stopped:
            raise Spent
        began, before = time.monotonic(), self.spent
        self._began = began if self._began is None else self._began
        try:
            failed = self._call(calls)
            self._call(failed)
        except KeyboardInterrupt:
            if not interrupts.resume():
                raise
            self.interrupted = True
            self.events.warn(
                f"interrupted: the choice uses the {self.spent} evaluations so far "
                "(Ctrl-C again ends it all)"
            )
        if self.spent > before and (took := time.monotonic() - began) > 0:
            self._pace = (self.spent - before) / took
        if any(p not in self.found.get(call.average, ()) for call in calls for p in call.parts):
            raise Spent

    def _new(self, wanted: Iterable[tuple[Average, Iterable[int]]]) -> Iterator[Asked]:
        """Yield calls for what is not known yet, each part once."""
        bad, seen = self.bad, set[tuple[Average, int]]()
        for average, parts in wanted:
            known = self.found.get(average, {})
            new = [
                part
                for part in dict.fromkeys(parts)
                if part not in known and part not in bad and (average, part) not in seen
            ]
            if new and self.whole:
                new = [*range(self.parts)]
            seen |= {(average, part) for part in new}
            at_once = self.parts if self.whole else self.at_once
            for start in range(0, len(new), at_once):
                yield Asked(average, tuple(new[start : start + at_once]))

    def _call(self, calls: Sequence[Asked]) -> list[Asked]:
        """Make calls within the budget; return those to repeat part by part, as some part fails."""
        calls, repeated = self._affordable(calls), list[Asked]()
        for place, answer in self.evaluate(calls, self._until):
            call = calls[place]
            self.spent += self._cost(call)
            if not isinstance(answer, Failed):
                self._write(call, answer)
            elif answer.is_final:
                raise TaskError(answer.line)
            elif len(call.parts) == 1 or self.whole or self._always_fails(call.average):
                self._fail(call, answer.line)
            else:
                repeated += call.one_by_one()
                self._give_up_if_hopeless(call, answer.line)
            self.events.progress("evaluating", self.spent, self.evaluations or 0)
        return repeated

    def _cost(self, call: Asked) -> int:
        return 1 if self.whole else len(call.parts)

    def _affordable(self, calls: Sequence[Asked]) -> list[Asked]:
        if self.evaluations is None:
            return list(calls)
        if self.whole:
            return list(calls[: max(0, self.left)])
        taken, left = [], self.evaluations - self.spent
        for call in calls:
            if left <= 0:
                break
            taken.append(Asked(call.average, call.parts[:left]))
            left -= len(call.parts)
        return taken

    def _write(self, call: Asked, scores: Sequence[float | Sums]) -> None:
        self._in_a_row.clear()
        self._proven |= {i for i, weight in enumerate(call.average) if weight}
        known = {p: score for p, score in zip(call.parts, scores, strict=True) if is_known(score)}
        self.found.setdefault(call.average, {}).update(known)
        self._scored |= known.keys()
        low, high = self._range
        alone = [float(unit_scores([score], self.corpus)) for score in known.values()]
        self._range = min([low, *alone]), max([high, *alone])
        if broken := tuple(part for part in call.parts if part not in known):
            self._fail(Asked(call.average, broken), "its score is NaN or Inf")

    def _fail(self, call: Asked, line: str) -> None:
        for part in call.parts:
            self.found.setdefault(call.average, {})[part] = nan
            self._failed.setdefault(part, set()).add(call.average)
        for name in self._names(call):
            self.failures.append(f"{name}: {line}")
            if len(self.failures) <= REPORTED:
                self.events.warn(f"{name} has failed: {line}")
        self._give_up_if_hopeless(call, line)

    def _names(self, call: Asked) -> list[str]:
        if self.whole:
            return [f"evaluation {self.spent}"]
        return [f"part {self.name_of(part)}" for part in call.parts]

    def _always_fails(self, average: Average) -> bool:
        row = self.found.get(average, {})
        return len(row) >= MOST_FAILURES and not any(map(is_known, row.values()))

    def _give_up_if_hopeless(self, call: Asked, line: str) -> None:
        """End where all calls have failed, unless one part or one checkpoint may be to blame."""
        self._failed_calls.append((call, line))
        self._in_a_row.append(call)
        if self._share_nothing(
            [one for one, _ in self._failed_calls], self.stop_after or MOST_FAILURES
        ):
            self.check()
        if self.stop_after and self._share_nothing(self._in_a_row, self.stop_after):
            self.stopped = f"{len(self._in_a_row)} evaluations in a row have failed: {line}"
            self.events.warn(f"stopped: {self.stopped}")
            raise Spent

    def _share_nothing(self, calls: Sequence[Asked], fewest: int) -> bool:
        """Return whether this many calls have neither a part nor a checkpoint in common."""
        parts = {one.parts for one in calls}
        columns = enumerate(zip(*(one.average for one in calls), strict=True))
        suspects = {i for i, column in columns if all(column)} - self._proven
        several = self.whole or len(parts) >= min(2, self.parts)
        return len(calls) >= fewest and several and not suspects

    def check(self) -> None:
        """Raise an error if there is no score at all, of all that was tried."""
        if self._failed_calls and not self.has_scores:
            call, line = self._failed_calls[0]
            what = "average" if self.whole else "part"
            raise TaskError(f"no {what} could be scored; {self._names(call)[0]}: {line}")

    # ---- what is on it --------------------------------------------------------------------------

    @property
    def bad(self) -> set[int]:
        """Return parts that fail for all averages that were asked on them, and for several."""
        if self.whole:  # it is the call that fails
            return set()
        return {
            part for part, who in self._failed.items() if part not in self._scored and len(who) > 1
        }

    @property
    def has_scores(self) -> bool:
        return bool(self._scored)

    def parts_of(self, average: Average) -> list[int]:
        bad = self.bad
        row = self.found.get(average, {})  # in the order in which they came: not for sums
        return sorted(part for part in row if part not in bad)

    def has_failed(self, average: Average) -> bool:
        return not all(is_known(self.found[average][part]) for part in self.parts_of(average))

    def scores(self, average: Average, parts: Sequence[int]) -> Tensor:
        """Return scores on parts that it was asked on; a failure is worse than all scores."""
        row, worst = self.found.get(average, {}), self.criterion.below(*self._range)
        found = unit_scores([row[part] for part in parts], self.corpus)
        return found.where(found.isfinite(), worst)

    def mean(self, average: Average, parts: Sequence[int] | None = None) -> float:
        """Return its mean over these parts, or all that it was asked on; NaN: there are none."""
        some = self.parts_of(average) if parts is None else parts
        if not some:
            return nan
        weights = self.weights[list(some)]
        return float(self.scores(average, some) @ (weights / weights.sum()))

    def rank(self, average: Average, parts: Sequence[int] | None = None) -> float:
        """Return a key that sorts the best mean first."""
        return self.criterion.rank(self.mean(average, parts))

    def leads(self, one: Average, over: Average, parts: Sequence[int]) -> Tensor:
        """Return by how much it is better than another, on parts that both were asked on."""
        lead = self.criterion.lead(self.scores(one, parts), self.scores(over, parts))
        return lead * (self.weights[list(parts)] / self.weights.mean())
