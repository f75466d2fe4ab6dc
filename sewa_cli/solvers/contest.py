"""The incumbent, the duel at the end and the outcome, shared by the solvers by a metric.

The best of many was lucky: on the parts that it was chosen by it looks better than it is. So some
parts are kept from every search. On these the leader meets the incumbent, which is written
unless they confirm that the leader is better. The incumbent is the choice by the loss or one that
the user names, else the better of the last checkpoint and the best baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sewa_cli.methods import mean_of
from sewa_cli.methods.fixed import family
from sewa_cli.report.findings import ContestEntry, Expected, State
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED, Choice, Problem
from sewa_cli.solvers.board import Average, Board, Spent
from sewa_cli.stats import evidence, is_shown
from sewa_cli.text import finite, with_K

FEWEST_TO_CONFIRM = 25  # parts; with fewer no lead could be shown to be more than luck
SEARCHED = 0.6  # of the parts; the others are for the duel
LISTED = 100  # entries, and failures, in the report
STRIDE = 8  # parts of a duel on which one is scored before the other is: time may run out
LEAST = 2  # parts on which averages are compared at all
SAME = 8  # equal scores of one average, from which on all its parts count as one
NOT_SIMPLE = ("by loss", "mask", "blend", "tilt", "swap")  # how names of learned averages begin


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
    """The end of a contest, for the report.

    baseline    the best one besides the last checkpoint and the incumbent
    confirmed   whether the duel showed the leader to be better; None: there are too few parts
    ahead       by how much the leader was better, in the mean over the parts of the duel
    duel_parts  how many of these both were scored on
    unspent     why evaluations of the budget are left
    """

    taken: Entrant
    incumbent: Entrant
    leader: Entrant
    baseline: Entrant | None
    confirmed: bool | None
    evidence: float
    ahead: float | None
    duel_parts: int
    unspent: str | None
    entries: list[ContestEntry]


@dataclass
class Contest:
    """Averages on one board.

    by_loss    what would be chosen without the metric, where the task has a loss
    baselines  by their coefficients
    searched   parts that searches use; the `fresh` ones are for the duel
    entrants   all that took part, by their coefficients
    """

    problem: Problem
    board: Board
    by_loss: Choice | None
    last: Entrant
    incumbent: Entrant
    baselines: Mapping[Average, Entrant]
    searched: list[int]
    fresh: list[int]
    entrants: dict[Average, Entrant]

    @property
    def k(self) -> int:
        return self.problem.trajectory.k

    @property
    def has_few_parts(self) -> bool:
        return self.board.parts < FEWEST_TO_CONFIRM

    @property
    def is_open(self) -> bool:
        """Return whether the best baseline may be written without being confirmed."""
        return self.by_loss is None and self.problem.incumbent is None

    @property
    def duel_parts(self) -> list[int]:
        return self.searched if self.has_few_parts else self.fresh

    def enter(self, name: str, K: int | None, coefficients: Sequence[float]) -> Entrant:
        """Add an average; if it is there already, it keeps its first name."""
        average = tuple(coefficients)
        return self.entrants.setdefault(average, Entrant(name, K, average))

    def mark(self, entrant: Entrant, state: State) -> None:
        self.entrants[entrant.average] = replace(entrant, state=state)

    def allowance(self, share: float, of: float | None = None) -> Callable[[], int]:
        """Return a function that counts the evaluations left of a share of the budget.

        `of`: the share of all searches. They have more where a duel cannot use the rest.
        """
        board = self.board

        def left() -> int:
            unused = board.total - 2 * len(self.duel_parts)
            mine = max(share * board.total, share / (of or share) * unused)
            return min(board.left, int(mine) - board.spent)

        return left

    def lead(self, one: Entrant, over: Entrant, parts: Sequence[int] | None = None) -> Tensor:
        """Return by how much it is better, part by part, on those that both were asked on."""
        both = {*self.board.parts_of(one.average)} & {*self.board.parts_of(over.average)}
        some = (*self.searched, *self.fresh) if parts is None else parts
        return self.board.leads(one.average, over.average, [part for part in some if part in both])

    def best(self, some: Sequence[Entrant]) -> Entrant:
        """Return the best by the parts that all of them have; the incumbent where it is level."""
        rows = [{*self.board.parts_of(entrant.average)} for entrant in some]
        order = (*self.searched, *self.fresh)
        common = [part for part in order if all(part in row for row in rows)]
        first = sorted(some, key=lambda entrant: entrant.average != self.incumbent.average)
        return min(first, key=lambda entrant: self.board.rank(entrant.average, common))

    def best_of_most_asked(self, some: Sequence[Entrant]) -> Entrant | None:
        """Return the best of those that were asked on the most parts: over few, luck decides."""
        counts = {entrant: len(self.board.parts_of(entrant.average)) for entrant in some}
        most = max(counts.values(), default=0)
        return self.best([e for e, count in counts.items() if count == most]) if most else None

    def find_pace(self) -> None:
        """Time evaluations for a budget in seconds, after those that make what is made once."""
        board, average = self.board, self.incumbent.average
        more = self.searched[LEAST : LEAST + board.abreast]
        with suppress(Spent):
            board.ask([(average, self.searched[:LEAST])])
            if len(more) == board.abreast < board.left:
                board.ask([(average, more)])

    def decide(self, leader: Entrant) -> Choice:
        """Spend what is left of the budget on the duel, and choose by it.

        Where parts are few all of them were searched, and the mean is all that there is. Between
        the last checkpoint and the best baseline the mean decides, however many parts there are.
        """
        others = (self.last.average, self.incumbent.average)
        baseline = self.best_of_most_asked(
            [entrant for average, entrant in self.baselines.items() if average not in others]
        )
        free = [self.last, baseline] if baseline else [self.last]
        if self.is_open:
            is_baseline = baseline is not None and leader.average == baseline.average
            self.incumbent = self.last if is_baseline else self.best(free)
        rival: Entrant | None = self.incumbent
        if is_same := leader.average == self.incumbent.average:
            rival = self.last if leader.average != self.last.average else baseline
        lead = torch.zeros(0, dtype=torch.float64)
        if rival is not None:
            self._duel(leader, rival)
            if not is_same:
                lead = self.lead(leader, rival, self.duel_parts)
        self.board.check()
        cannot_confirm = self.has_few_parts or self._ignores_parts(leader)
        confirmed = None if cannot_confirm else is_shown(lead)
        by = float(lead.mean()) if len(lead) else None
        is_better = (by or 0) > 0 if cannot_confirm else confirmed
        taken = self.best(free) if self.is_open else self.incumbent
        if is_better:
            taken = leader
        shown = 1.0 if cannot_confirm else evidence(lead)
        dueled = None if is_same or cannot_confirm else shown
        outcome = Outcome(
            taken,
            self.incumbent,
            leader,
            baseline,
            confirmed,
            shown,
            by,
            len(lead),
            self._why_unspent(leader, rival),
            self._entries(leader, taken, dueled),
        )
        if self.by_loss is not None and taken.average == tuple(self.by_loss.coefficients):
            kept = [one for one in self.by_loss.findings if not isinstance(one, Expected)]
            return replace(self.by_loss, findings=[*kept, outcome])
        name = LEARNED if taken.name.startswith(NOT_SIMPLE) else taken.label
        return Choice(list(taken.average), name, [outcome])

    def _duel(self, leader: Entrant, rival: Entrant) -> None:
        """Ask both on as many parts of the duel as the budget carries.

        It does not end when it looks won: an average that wins often and rarely loses, but by much,
        would mostly be ahead at some moment.
        """
        board, parts = self.board, self.duel_parts
        both = rival.average, leader.average
        if board.evaluations is not None:
            known = [{*board.parts_of(average)} for average in both]
            costs = accumulate(sum(part not in row for row in known) for part in parts)
            parts = [part for part, cost in zip(parts, costs, strict=True) if cost <= board.left]
        turns = [parts[start : start + STRIDE] for start in range(0, len(parts), STRIDE)]
        with suppress(Spent):
            board.ask([(average, turn) for turn in turns for average in both])

    def _why_unspent(self, leader: Entrant, rival: Entrant | None) -> str | None:
        board = self.board
        if board.stopped is not None:
            return board.stopped
        if board.evaluations is None or board.interrupted or board.left == 0:
            return None
        if rival is None:
            return "there was no other average to meet"
        if board.whole or board.parts == 1:
            return "the search has tried all that it had to try"
        parts = {*self.duel_parts} - board.bad
        if all(parts.issubset(board.found.get(a.average, ())) for a in (leader, rival)):
            return f"the search has settled, and the duel has used all of its {len(parts)} parts"
        return "too few for another part of the duel"

    def _ignores_parts(self, leader: Entrant) -> bool:
        """Return whether each average has one score on all parts, which are then one."""
        board = self.board
        rows = {a: board.scores(a, board.parts_of(a)) for a in board.found}
        compared = self.incumbent.average, leader.average
        if any(len(rows.get(average, ())) < SAME for average in compared):
            return False
        if any(len(row) and float(row.min()) != float(row.max()) for row in rows.values()):
            return False
        self.problem.events.warn(
            "score() returns the same number for every part, so that they count as one; check that "
            "it uses its part"
        )
        return True

    def _entries(self, leader: Entrant, taken: Entrant, dueled: float | None) -> list[ContestEntry]:
        """List those that were asked on many parts first: over few, luck decides.

        dueled: the e-value of the leader, if there was a duel.
        """
        board = self.board
        asked = [entrant for entrant in self.entrants.values() if board.parts_of(entrant.average)]
        asked.sort(key=lambda e: (-len(board.parts_of(e.average)), board.rank(e.average)))
        always = {leader.average, taken.average, self.incumbent.average}
        kept = [e for i, e in enumerate(asked) if i < LISTED or e.average in always]
        return [self._entry(entrant, leader, taken, dueled) for entrant in kept]

    def _entry(
        self, entrant: Entrant, leader: Entrant, taken: Entrant, dueled: float | None
    ) -> ContestEntry:
        board, average = self.board, entrant.average
        parts = board.parts_of(average)
        scores, lead = board.scores(average, parts), self.lead(entrant, self.incumbent)
        has_failed, state = board.has_failed(average), entrant.state
        if average in (taken.average, leader.average):
            state = "taken" if average == taken.average else "leading"
        elif has_failed:
            state = "failed"
        is_other = average != self.incumbent.average and len(lead) > 0
        error = float(scores.std()) / len(scores) ** 0.5 if len(scores) > 1 else None
        chosen = [i for i, c in enumerate(average) if c != 0]
        steps = self.problem.steps
        return ContestEntry(
            name=entrant.name,
            K=entrant.K,
            size=len(chosen),
            selected=chosen,
            selected_steps=[steps[i] for i in chosen] if steps else None,
            coefficients=[average[i] for i in chosen],
            parts=len(parts),
            score=None if has_failed else finite(board.mean(average)),
            error=None if has_failed else finite(error),
            ahead=finite(float(lead.mean())) if is_other else None,
            evidence=dueled if average == leader.average else None,
            state=state,
        )


def swaps(average: Average, random: torch.Generator) -> Iterator[list[float]]:
    """Yield means in which one checkpoint of an average has the place of another."""
    chosen = [i for i, weight in enumerate(average) if weight != 0]
    others = [i for i, weight in enumerate(average) if weight == 0]
    for pair in torch.randperm(len(chosen) * len(others), generator=random).tolist():
        out, new = chosen[pair // len(others)], others[pair % len(others)]
        yield mean_of([*(i for i in chosen if i != out), new], len(average))


def open_contest(problem: Problem, K: int) -> Contest:
    """Divide the parts, let the loss choose where there is one, and settle the incumbent."""
    board, k = problem.board, problem.trajectory.k
    assert board is not None
    generator = torch.Generator().manual_seed(problem.seed)
    order: list[int] = torch.randperm(board.parts, generator=generator).tolist()
    cut = len(order) if board.parts < FEWEST_TO_CONFIRM else int(SEARCHED * len(order))
    by_loss = None if problem.by_loss is None else problem.by_loss(K)
    known = [last := Entrant("last", None, tuple(mean_of([k - 1], k)))]
    if by_loss is not None:
        known.append(Entrant("by loss", None, tuple(by_loss.coefficients)))
    if problem.incumbent is not None:
        name, coefficients = problem.incumbent
        known.append(Entrant(*name, tuple(coefficients)))
    contest = Contest(
        problem,
        board,
        by_loss,
        last,
        incumbent=known[-1],
        baselines={
            tuple(c): Entrant(*name, tuple(c))
            for name, c in family(k, K, counts=problem.counts).items()
            if K in (AUTO, sum(weight != 0 for weight in c))
        },
        searched=order[:cut],
        fresh=order[cut:],
        entrants={entrant.average: entrant for entrant in known},
    )
    if board.seconds is not None:
        contest.find_pace()
    return contest
