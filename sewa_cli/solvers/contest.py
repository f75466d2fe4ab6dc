"""What solvers by a metric share: the one to beat, the duel in the end, what is said of it all.

The winner of many is lucky: on the parts that made it the winner it looks better than it is. So it
is not taken for its lead. Some parts are kept from every search. On these it meets the incumbent,
which is written unless they show the leader to be better. The incumbent is the choice by the loss
or one that the user names, else the better of the last checkpoint and the best baseline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sewa_cli.methods import mean_of
from sewa_cli.methods.family import family
from sewa_cli.objective.board import Average, Board, Spent
from sewa_cli.objective.evidence import evidence, is_shown
from sewa_cli.report.metric import Entry, State
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED, Choice, Problem, mask
from sewa_cli.text import finite, with_K

FEWEST = 25  # parts; with fewer no lead could be shown to be more than luck
SEARCHED = 0.6  # of the parts; the others are for the duel
SHOWN = 100  # entries in the report
IDLE = 20  # rounds that ask for less than one thing each that is not known: it has settled
STRIDE = 8  # parts of a duel that one meets before the other does: it may end at any moment
LEAST = 2  # parts on which averages meet at all
SAME = 8  # parts with one and the same score, from which on they count as one part
NOT_SIMPLE = ("by loss", "mask", "blend", "tilt", "swap")  # as names of what was searched for begin


@dataclass(frozen=True)
class Entrant:
    """An average with a name."""

    name: str
    K: int | None
    average: Average
    state: State | None = None

    @property
    def label(self) -> str:
        return with_K(self.name, self.K)


@dataclass(frozen=True)
class Outcome:
    """For the report, beside the choice itself."""

    taken: Entrant
    incumbent: Entrant
    leader: Entrant
    baseline: Entrant | None  # the best one besides the last checkpoint and the incumbent
    crowned: bool | None
    evidence: float
    ahead: float | None  # how far the leader was, in the mean over the duel's parts
    dueled: int  # parts of the duel
    unspent: str | None  # why evaluations of the budget are left
    entries: list[Entry]


class Contest:
    """Averages on one board."""

    def __init__(self, problem: Problem, K: int) -> None:
        assert problem.board is not None
        self.board: Board = problem.board
        self.problem = problem
        self.k = problem.trajectory.k
        generator = torch.Generator().manual_seed(problem.seed)
        order: list[int] = torch.randperm(self.board.parts, generator=generator).tolist()
        self.few = self.board.parts < FEWEST
        cut = len(order) if self.few else int(SEARCHED * len(order))
        self.searched, self.fresh = order[:cut], order[cut:]
        self._turn = 0
        self._spent: deque[int] = deque(maxlen=IDLE)
        self.by_loss = None if problem.by_loss is None else problem.by_loss(K)
        self.last = Entrant("last", None, tuple(mean_of([self.k - 1], self.k)))
        self._baselines = {
            tuple(c): Entrant(*name, tuple(c))
            for name, c in family(self.k, K).items()
            if K in (AUTO, sum(weight != 0 for weight in c))
        }
        self.incumbent = self._incumbent()
        self.entrants = {self.last.average: self.last}
        if self.by_loss is not None:
            average = tuple(self.by_loss.coefficients)
            self.entrants[average] = Entrant("by loss", None, average)
        self.entrants[self.incumbent.average] = self.incumbent
        if self.board.seconds is not None:
            self._find_pace()

    def _find_pace(self) -> None:
        """How many evaluations there is time for. The first ones make what is made only once."""
        board, average = self.board, self.incumbent.average
        more = self.searched[LEAST : LEAST + board.abreast]
        with suppress(Spent):
            board.ask([(average, self.searched[:LEAST])])
            if len(more) == board.abreast < board.left:
                board.forget_pace()
                board.ask([(average, more)])

    def _incumbent(self) -> Entrant:
        """The last checkpoint, where a baseline may yet turn out to be better."""
        if self.problem.incumbent is not None:
            name, coefficients = self.problem.incumbent
            return Entrant(*name, tuple(coefficients))
        if self.by_loss is not None:
            return Entrant("by loss", None, tuple(self.by_loss.coefficients))
        return self.last

    @property
    def is_open(self) -> bool:
        """Whether the best baseline may be written without being shown to be better."""
        return self.by_loss is None and self.problem.incumbent is None

    def _best_baseline(self) -> Entrant | None:
        """The best by the parts that all those share which were asked on the most.

        By the few parts that those have too who were set aside early, luck would decide.
        """
        parts = {
            entrant: len(self.board.parts_of(average))
            for average, entrant in self._baselines.items()
            if average not in (self.last.average, self.incumbent.average)
        }
        most = max(parts.values(), default=0)
        front = [entrant for entrant, count in parts.items() if count == most > 0]
        return self.best(front) if front else None

    def enter(self, name: str, K: int | None, coefficients: Sequence[float]) -> Entrant:
        """The same average is entered once, under its first name."""
        average = tuple(coefficients)
        if average not in self.entrants:
            self.entrants[average] = Entrant(name, K, average)
        return self.entrants[average]

    def mark(self, entrant: Entrant, state: State) -> None:
        self.entrants[entrant.average] = replace(entrant, state=state)

    def ahead(
        self, entrant: Entrant, parts: Sequence[int] | None = None, over: Entrant | None = None
    ) -> Tensor:
        """By how much, part by part, on those that `over`, the incumbent, was asked on too."""
        one, two = (over or self.incumbent).average, entrant.average
        both = {*self.board.parts_of(one)} & {*self.board.parts_of(two)}
        some = (*self.searched, *self.fresh) if parts is None else parts
        return self.board.differences(one, two, [part for part in some if part in both])

    def next_parts(self, count: int) -> list[int]:
        """Of those to search by, round and round: no part has its say more often than others."""
        some = [self.searched[(self._turn + n) % len(self.searched)] for n in range(count)]
        self._turn = (self._turn + count) % len(self.searched)
        return list(dict.fromkeys(some))

    def goes_on(self) -> bool:
        """Whether rounds of a search still ask for what is not known; to be asked before each."""
        spent = self.board.spent
        self._spent.append(spent)
        if len(self._spent) < IDLE or spent - self._spent[0] >= IDLE:
            return True
        self.problem.events.note(
            f"the search has settled after {spent} evaluations; what is left of the budget is for "
            "the duel"
        )
        return False

    def score_masks(self, masks: Tensor, count: int) -> Tensor | None:
        """Mean losses [M] of masks [M, k], all on the same parts. None: each of these is bad."""
        averages = [tuple(mean_of(m.nonzero().flatten().tolist(), self.k)) for m in masks]
        parts = self.next_parts(count)
        self.board.ask([(average, parts) for average in averages])
        bad = self.board.bad
        some = [part for part in parts if part not in bad]
        if not some or not self.board.has_scores:
            return None
        return torch.tensor([self.board.mean(a, some) for a in averages], dtype=torch.float64)

    def crown_mask(self, order: Tensor, K: int, history: list[float], **found: Any) -> Choice:
        """The K largest, if anything was learned; `found`: what else is worth reporting."""
        leader = self.incumbent
        if self.is_open:  # a search among masks has asked no baseline
            both = self.last, self.enter("latest", K, mean_of(range(self.k - K, self.k), self.k))
            with suppress(Spent):
                for part in self.next_parts(min(len(self.searched), self.board.left // 6)):
                    self.board.ask([(entrant.average, [part]) for entrant in both])
        if history:
            leader = self.enter("mask", K, mean_of(mask.largest(order, K), self.k))
        return self.crown(leader).but(history=history, **found)

    def best(self, some: Sequence[Entrant]) -> Entrant:
        """By the mean over the parts that all of them have; the incumbent where it is level."""
        rows = [{*self.board.parts_of(entrant.average)} for entrant in some]
        order = (*self.searched, *self.fresh)
        common = [part for part in order if all(part in row for row in rows)]
        first = sorted(some, key=lambda entrant: entrant.average != self.incumbent.average)
        return min(first, key=lambda entrant: self.board.mean(entrant.average, common))

    def crown(self, leader: Entrant) -> Choice:
        """The duel, with what is left of the budget; then what is taken.

        Where parts are few all of them were searched, and the mean is all that there is. Between
        the last checkpoint and the best baseline the mean decides, however many parts there are.
        """
        baseline, rest = self._best_baseline(), [self.last]
        if self.is_open and baseline is not None:
            rest.append(baseline)
            is_baseline = leader.average == baseline.average
            self.incumbent = self.last if is_baseline else self.best(rest)
        rival: Entrant | None = self.incumbent
        if is_same := leader.average == self.incumbent.average:
            rival = self.last if leader.average != self.last.average else baseline
        ahead = torch.zeros(0, dtype=torch.float64)
        if rival is not None:
            dueled = self._duel(leader, rival)
            ahead = ahead if is_same else dueled
        self.board.check()
        few = self.few or self._are_one_part(leader)
        crowned = None if few else is_shown(ahead)
        by = float(ahead.mean()) if len(ahead) else None
        is_better = by is not None and by > 0
        taken = self.best(rest) if self.is_open else self.incumbent
        if is_better if few else crowned:
            taken = leader
        outcome = Outcome(
            taken,
            self.incumbent,
            leader,
            baseline,
            crowned,
            1.0 if few else evidence(ahead),
            by,
            len(ahead),
            self._why_unspent(leader, rival),
            self._entries(leader, taken),
        )
        return self._choice(taken, outcome)

    def _why_unspent(self, leader: Entrant, rival: Entrant | None) -> str | None:
        board = self.board
        if board.evaluations is None or board.interrupted or board.left == 0:
            return None
        if rival is None:
            return "there was no other average to meet"
        parts = {*(self.searched if self.few else self.fresh)} - board.bad
        if all(parts.issubset(board.found.get(a.average, ())) for a in (leader, rival)):
            return f"the search has settled, and the duel has used all of its {len(parts)} parts"
        return "too few for another part of the duel"

    def _are_one_part(self, leader: Entrant) -> bool:
        """Whether each average has the same score on all parts: no two of them are evidence."""
        both = self.incumbent.average, leader.average
        rows = {a: self.board.losses(a, self.board.parts_of(a)) for a in self.board.found}
        if any(len(rows.get(a, ())) < SAME for a in both):
            return False
        if any(len(row) and float(row.min()) != float(row.max()) for row in rows.values()):
            return False
        self.problem.events.warn(
            "score() gives an average the same on every part, so that they count as one; does it "
            "look at its part?"
        )
        return True

    def _duel(self, leader: Entrant, rival: Entrant) -> Tensor:
        """How far the leader is ahead on parts that no search has seen, as many as can be asked.

        It does not end when it looks won: then one that wins often and rarely loses, but by much,
        would mostly be ahead at some moment.
        """
        board, parts = self.board, self.searched if self.few else self.fresh
        both = rival.average, leader.average
        some = parts if board.evaluations is None else self._affordable(both, parts)
        turns = [some[start : start + STRIDE] for start in range(0, len(some), STRIDE)]
        # all at once, so that every worker has something to do; by the clock a few turns at a time,
        # as long as there is time: nearly all that is cut off at its end has been met by both
        step = len(turns) if board.seconds is None else -(-board.abreast // STRIDE)
        with suppress(Spent):
            for n in range(0, len(turns), max(1, step)):
                board.ask([(a, turn) for turn in turns[n : n + step] for a in both])
        return self.ahead(leader, parts, rival)

    def _affordable(self, both: tuple[Average, Average], parts: list[int]) -> list[int]:
        """The first so many that the rest of the budget carries for both."""
        known, left = [{*self.board.parts_of(a)} for a in both], self.board.left
        for n, part in enumerate(parts):
            left -= sum(part not in row for row in known)
            if left < 0:
                return parts[:n]
        return parts

    def _entries(self, leader: Entrant, taken: Entrant) -> list[Entry]:
        """Those that were asked on many parts first: a mean over few is no rival to theirs."""
        listed = [e for e in self.entrants.values() if self.board.parts_of(e.average)]
        listed.sort(
            key=lambda e: (-len(self.board.parts_of(e.average)), self.board.mean(e.average))
        )
        always = {leader.average, taken.average, self.incumbent.average}
        kept = [e for i, e in enumerate(listed) if i < SHOWN or e.average in always]
        return [self._entry(entrant, leader, taken) for entrant in kept]

    def _entry(self, entrant: Entrant, leader: Entrant, taken: Entrant) -> Entry:
        parts = self.board.parts_of(entrant.average)
        losses, mean = self.board.losses(entrant.average, parts), self.board.mean(entrant.average)
        has_failed, ahead = self.board.has_failed(entrant.average), self.ahead(entrant)
        state = entrant.state
        if entrant.average in (taken.average, leader.average):
            state = "taken" if entrant.average == taken.average else "leading"
        elif has_failed:
            state = "failed"
        is_other = entrant.average != self.incumbent.average and len(ahead) > 0
        spread = float(losses.std()) / len(losses) ** 0.5 if len(losses) > 1 else None
        chosen = [i for i, c in enumerate(entrant.average) if c != 0]
        return Entry(
            name=entrant.name,
            K=entrant.K,
            size=len(chosen),
            selected=chosen,
            selected_steps=[steps[i] for i in chosen] if (steps := self.problem.steps) else None,
            coefficients=[entrant.average[i] for i in chosen],
            parts=len(parts),
            score=None if has_failed else finite(mean),
            error=None if has_failed else finite(spread),
            ahead=finite(float(ahead.mean())) if is_other else None,
            evidence=finite(evidence(ahead)) if is_other else None,
            state=state,
        )

    def _choice(self, taken: Entrant, outcome: Outcome) -> Choice:
        if self.by_loss is not None and taken.average == tuple(self.by_loss.coefficients):
            return self.by_loss.but(outcome=outcome, expected=None)
        name = LEARNED if taken.name.startswith(NOT_SIMPLE) else taken.label
        return Choice(list(taken.average), name, outcome=outcome)


def within(share: float, contest: Contest, of: float | None = None) -> Callable[[], int]:
    """Return a function that tells how many evaluations are left of a share of the budget.

    `of`: what all searches have of it. They have more where a duel cannot use the rest.
    """
    board = contest.board
    parts = board.parts if contest.few else len(contest.fresh)

    def left() -> int:
        mine = max(share * board.total, share / (of or share) * (board.total - 2 * parts))
        return min(board.left, int(mine) - board.spent)

    return left
