"""A search by few, expensive evaluations, where one call scores an average on everything.

It has nothing to do with `--sparse`, which averages few checkpoints.

First moving averages, by two numbers: the length of the window, then where it ends. Along each the
score falls and rises once, with noise on it, so the middle of the wider gap next to the best is
tried until the gaps are small. Then changes of the best: later or earlier checkpoints weigh more,
blends with the next best, single checkpoints added or dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import torch

from sewa_cli.methods import by_steps, mean_of
from sewa_cli.settings import AUTO
from sewa_cli.solvers.board import Spent, is_known
from sewa_cli.solvers.contest import Contest, Entrant, swaps

FOR_WINDOWS = 12  # evaluations before any change of the best is tried
CHANGES = 0.4  # of those beyond
LENGTHS = 0.7  # of those for windows, for lengths at the end of the run
STARTS = 3, 6  # lengths that are tried first, at least and at most
NEAR = 1.2  # lengths that differ by less count as the same
TILT = 1.0  # e^±1 from one end of the run to the other

Window = tuple[int, int]  # its length, and how many checkpoints there are after it


def search_few(contest: Contest, K: int) -> Entrant | None:
    """Spend the budget on windows and changes of the best; return the best."""
    with suppress(Spent):
        _ask(contest, [contest.last, contest.incumbent])
        _Windows(contest).search(K)
        _change(contest, K)
    return next(iter(_asked(contest)), None)


def _ask(contest: Contest, some: list[Entrant]) -> None:
    contest.board.ask([(entrant.average, contest.searched) for entrant in some])


def _asked(contest: Contest) -> list[Entrant]:
    """Return those that were scored, best first."""
    ranks = {entrant: _rank(contest, entrant) for entrant in contest.entrants.values()}
    return sorted((e for e, rank in ranks.items() if math.isfinite(rank)), key=ranks.__getitem__)


def _rank(contest: Contest, entrant: Entrant) -> float:
    """Return a key that sorts the best first; infinite if it was not asked, or has failed."""
    row, parts = contest.board.found.get(entrant.average, {}), contest.searched
    has_all = all(is_known(row.get(part, math.nan)) for part in parts)
    return contest.board.rank(entrant.average, parts) if has_all else math.inf


# ---- windows ---------------------------------------------------------------------------------


class _Windows:
    """Windows that were tried, and a search along one of their two numbers at a time."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self._found: dict[Window, Entrant] = {}

    def search(self, K: int) -> None:
        board, k = self._contest.board, self._contest.k
        windows = board.total - CHANGES * max(0, board.total - FOR_WINDOWS)
        end = 0
        self._try([(1, end)])
        while self._best() is None and 2 * end < k:  # the newest ones may have diverged
            end = max(1, 2 * end)
            self._try([(1, end)])
        if K == AUTO:
            count = min(max(STARTS[0], board.total // 3), STARTS[1])
            powers = [n / (count - 1) for n in range(count)]
            self._lengths(end, [round(k**power) for power in powers], LENGTHS * windows)
        else:
            self._ends(K, [n * (k - K) // 4 for n in range(5)], windows)
        while K == AUTO and (best := self._best()) is not None and board.spent < windows:
            before, (n, end) = len(self._found), best
            self._ends(n, [end, end + max(1, n // 4)], windows)
            n, moved = self._best() or best
            if moved != end:
                self._lengths(moved, [n, round(n / 1.5), round(n * 1.5)], windows)
            if len(self._found) == before:
                return

    def _lengths(self, end: int, first: Sequence[int], until: float) -> None:
        self._along(lambda n: (n, end), first, _between_lengths, until)

    def _ends(self, n: int, first: Sequence[int], until: float) -> None:
        near = max(1, n // 8)

        def between(low: int, high: int) -> int | None:
            return (low + high) // 2 if high - low > near else None

        self._along(lambda end: (n, end), first, between, until)

    def _best(self) -> Window | None:
        some = [w for w, entrant in self._found.items() if _rank(self._contest, entrant) < math.inf]
        return min(some, key=lambda w: _rank(self._contest, self._found[w]), default=None)

    def _along(
        self,
        window: Callable[[int], Window],
        first: Sequence[int],
        middle: Callable[[int, int], int | None],
        until: float,
    ) -> None:
        """Try the first values, then the middles of gaps, those next to the best values first."""
        contest, board = self._contest, self._contest.board
        values = [value for value in dict.fromkeys(first) if self._fits(window(value))]
        while (left := min(int(until) - board.spent, board.left)) > 0:
            wanted = [value for value in values if window(value) not in self._found]
            if not wanted:
                ranks = {v: _rank(contest, self._found[window(v)]) for v in values}
                best, order = sorted(values, key=ranks.__getitem__), sorted(values)
                gaps = sorted(
                    pairwise(order),
                    key=lambda gap: (min(map(best.index, gap)), -gap[1] / max(1, gap[0])),
                )
                wanted = [m for gap in gaps[:2] if (m := middle(*gap)) is not None]
                wanted = [value for value in wanted if value not in values]
            if not wanted:
                return
            wanted = wanted[: min(left, board.abreast)]
            values = list(dict.fromkeys((*values, *wanted)))
            self._try([window(value) for value in wanted])

    def _try(self, windows: Sequence[Window]) -> None:
        self._found |= {window: self._enter(window) for window in windows}
        _ask(self._contest, [self._found[window] for window in windows])

    def _fits(self, window: Window) -> bool:
        return window[0] >= 1 and window[1] >= 0 and sum(window) <= self._contest.k

    def _enter(self, window: Window) -> Entrant:
        contest, (n, after), k = self._contest, window, self._contest.k
        end = k - after
        average = by_steps(mean_of(range(end - n, end), k), contest.problem.counts)
        if (known := contest.baselines.get(tuple(average))) is not None:
            return contest.enter(known.name, known.K, average)
        if n == 1:
            return contest.enter(contest.problem.name_of(end - 1), None, average)
        name = "latest" if after == 0 else contest.problem.name_of(end - n, end - 1)
        return contest.enter(name, n, average)


def _between_lengths(low: int, high: int) -> int | None:
    middle = round(math.sqrt(low * high))
    return middle if low < middle < high and high > NEAR * low else None


# ---- changes of the best ---------------------------------------------------------------------


def _change(contest: Contest, K: int) -> None:
    """Try changes of the best; a better one is the next to be changed."""
    random = torch.Generator().manual_seed(contest.problem.seed + 1)
    board, tried, count = contest.board, {*contest.entrants}, 0
    leader = None
    while board.left > 0 and (best := next(iter(_asked(contest)), None)) is not None:
        if best is not leader:
            leader, variants = best, _variants(contest, best, K, random)
        some: list[Entrant] = []
        for name, average in variants:
            if tuple(average) not in tried:
                tried.add(tuple(average))
                count += 1
                some.append(contest.enter(f"{name} {count}", K or None, average))
            if len(some) == min(board.abreast, board.left):
                break
        if not some:
            return
        _ask(contest, some)


def _variants(
    contest: Contest, leader: Entrant, K: int, random: torch.Generator
) -> Iterator[tuple[str, list[float]]]:
    k = contest.k
    c = torch.tensor(leader.average, dtype=torch.float64)
    chosen = [i for i, weight in enumerate(leader.average) if weight != 0]
    if K == AUTO:
        for tilt in (TILT, -TILT) if len(chosen) > 1 else ():
            span = torch.linspace(-0.5, 0.5, len(chosen), dtype=torch.float64)
            tilted = c.clone()
            tilted[chosen] *= torch.exp(tilt * 2 * span)
            yield "tilt", (tilted / tilted.sum()).tolist()
        for other in _asked(contest)[1:3]:
            yield "blend", ((c + torch.tensor(other.average, dtype=torch.float64)) / 2).tolist()
        for i in torch.randperm(k, generator=random).tolist():
            if leader.average[i] == 0:
                size = len(chosen)
                yield (
                    "add",
                    ((c * size + torch.eye(k, dtype=torch.float64)[i]) / (size + 1)).tolist(),
                )
            elif len(chosen) > 1:
                without = c.clone()
                without[i] = 0
                yield "drop", (without / without.sum()).tolist()
        return
    yield from (("swap", average) for average in swaps(leader.average, random))
