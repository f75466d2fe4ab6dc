"""A race of averages by a metric: many start, the budget goes to those that lead.

These start: the choice by the loss where there is one, the baselines, stretches of the run and
single checkpoints; where there is no loss, random masks too. All are asked on the same parts in the
same order. In each heat all that are left are asked on more parts, at least twice as many. Those
that are significantly worse than the leader (an anytime-valid test, for all of them at once) are
dropped, and of the rest the better half goes on, or fewer where the budget carries no more. Then
small changes of the winner are tried; then it meets the incumbent (`contest`). Where one call
scores an average on everything, there are no heats to run: another search is made (`few`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from pydantic import Field

from sewa_cli.methods import Run, by_steps, mean_of, parse_one
from sewa_cli.methods.fixed import family, grid, moving_averages
from sewa_cli.report.findings import Blend
from sewa_cli.settings import AUTO, Share
from sewa_cli.solvers import Choice, Problem, Solver, register
from sewa_cli.solvers.board import Spent
from sewa_cli.solvers.contest import LEAST, Contest, Entrant, open_contest, swaps
from sewa_cli.solvers.few import search_few
from sewa_cli.stats import SURE, evidence

STRETCHES = (2, 4)  # the number of pieces that the run is cut into
WINDOWS = 32  # stretches of K checkpoints, from one end of the run to the other
SINGLES = 8  # checkpoints that start alone; more where the budget carries them
MASKS = 16  # drawn at random
TILT = 1.0  # e^±1 from one end of the run to the other
CLEAR = 1.0  # standard errors by which a change must be better to be kept

Named = tuple[str, int | None, list[float]]  # an average, what it is called, and its K


class Race(Solver):
    """The default by a metric: the budget goes to the leaders."""

    class Settings(Solver.Settings):
        heats: Share = Field(0.5, description="share of the budget for finding a winner")
        changes: Share = Field(0.2, description="share of the budget for changing it a little")

    needs = frozenset({"parts"})
    finds_k = True
    settings: Settings

    def choose(self, problem: Problem, K: int) -> Choice:
        """Run heats, then change the winner; the rest of the budget is for the duel."""
        contest, settings, leader = open_contest(problem, K), self.settings, None
        if contest.board.whole or contest.board.parts == 1:
            leader = search_few(contest, K) or contest.best_of_most_asked(
                [*contest.entrants.values()]
            )
            return contest.decide(leader or contest.incumbent)
        search = settings.heats + settings.changes
        heats, changes = (contest.allowance(share, search) for share in (settings.heats, search))
        with suppress(Spent):
            alive, parts = _run_heats(contest, _start(contest, K, heats()), heats)
            leader = _change(contest, alive, parts, changes, K)
        if leader is None:  # the budget ended before there was a winner
            leader = contest.best_of_most_asked([*contest.entrants.values()])
        return contest.decide(leader or contest.incumbent)


def _start(contest: Contest, K: int, budget: int) -> list[Entrant]:
    """Enter the incumbent first, and as many others as the first heat has half of the budget for.

    At most half are single checkpoints, and a third if not all can start: the good ones may lack
    the end of the run, and an average need not be good.
    """
    most = max(3, budget // (2 * min(LEAST, len(contest.searched))))
    first = list(dict.fromkeys((contest.incumbent, *contest.entrants.values())))
    listed, alone = list(_candidates(contest, K)), list[Named]()
    listed = [one for one in listed if tuple(one[2]) not in contest.entrants]
    if K == AUTO:
        others = 1 + len(listed)
        alone = list(_singles(contest, min(others, max(most - others, most // 3))))
    listed = _thinned(listed, most - len(first) - len(alone))
    started = [*first, *(contest.enter(*one) for one in (*listed, *alone))]
    return list({entrant.average: entrant for entrant in started}.values())[:most]


def _thinned(some: list[Named], most: int) -> list[Named]:
    """Take at most `most`, evenly from the list and in its order."""
    count = min(len(some), max(most, 0))
    return [some[n * len(some) // count] for n in range(count)]


def _singles(contest: Contest, count: int) -> Iterator[Named]:
    """Yield single checkpoints from all over the run; the first half of them are spread too."""
    k = contest.k
    order = (0, *range(count - 1, 0, -2), *range(count - 2, 0, -2)) if count > 1 else ()
    for i in dict.fromkeys(round(n * (k - 1) / (count - 1)) for n in order):
        yield contest.problem.name_of(i), None, mean_of([i], k)


def _candidates(contest: Contest, K: int) -> Iterator[Named]:
    k = contest.k
    random = torch.Generator().manual_seed(contest.problem.seed)
    counts = contest.problem.counts
    every = family(k, coarse=True, counts=counts)
    if K == AUTO:
        moving = [name for name in moving_averages(k) if name in every]
        for name in (*moving, *(name for name in every if name not in moving)):
            yield *name, every[name]
        if contest.by_loss is not None and (blend := contest.by_loss.find(Blend)) is not None:
            yield "prior", None, blend.weights
        for pieces in STRETCHES:
            for n in range(pieces):
                some = range(n * k // pieces, (n + 1) * k // pieces)
                if len(some) > 1:
                    yield (
                        f"{_ORDINAL[n]} {_PIECE[pieces]}",
                        None,
                        by_steps(mean_of(some, k), counts),
                    )
        yield from _singles(contest, SINGLES)
    else:
        # a window of K weighs more than K, or not equally
        names = [name for name, weights in every.items() if sum(w != 0 for w in weights) == K]
        names += [(name, K) for name in ("latest", "lawa") if (name, K) not in every]
        for name in names:
            yield *name, parse_one(name[0])(Run(k, counts=counts), name[1])[0]
        windows = min(WINDOWS, k // K)
        for n in range(windows):
            end = k - round(n * (k - K) / max(1, windows - 1))
            ends = contest.problem.name_of(*{end - K: 0, end - 1: 0})
            yield ends, K, mean_of(range(end - K, end), k)
    sizes = [K] if K != AUTO else [size for size in grid(k) if 1 < size <= 50] or [max(1, k // 2)]
    if K != AUTO or contest.by_loss is None:
        for n in range(MASKS):
            size = sizes[n % len(sizes)]
            chosen = torch.randperm(k, generator=random)[:size].tolist()
            yield f"mask {n + 1}", size, mean_of(chosen, k)


_ORDINAL = ("first", "second", "third", "fourth")
_PIECE = {2: "half", 4: "quarter"}


def _run_heats(
    contest: Contest, alive: list[Entrant], left: Callable[[], int]
) -> tuple[list[Entrant], list[int]]:
    """Return those that are left, best first, and the parts that all of them were asked on."""
    board, incumbent, n, started = contest.board, contest.incumbent.average, 0, len(alive)
    while len(alive) > 1 and n < len(contest.searched):
        heats = max(1, math.ceil(math.log2(len(alive))))
        more = max(left() // heats // len(alive), n or LEAST)
        if n > 0 and (more := min(more, left() // len(alive))) < 1:
            break
        n = min(n + more, len(contest.searched))
        # all on a few parts first, and after the incumbent single checkpoints: if one has exploded,
        # what it is not in shows that the rest have not; if nothing works, that is soon known
        asked = sorted(
            alive, key=lambda e: (e.average != incumbent, sum(c != 0 for c in e.average))
        )
        board.ask([(e.average, contest.searched[:m]) for m in (LEAST, n) for e in asked])
        if not (parts := _good(contest, n)):
            continue  # no average has a score on any of them
        leader = contest.best(alive)
        alive.sort(key=lambda entrant: board.rank(entrant.average, parts))
        for entrant in list(alive):
            lead = board.leads(leader.average, entrant.average, parts)
            if entrant is not leader and evidence(lead) >= SURE * started:
                contest.mark(entrant, "dropped")
                alive.remove(entrant)
        front = _how_many(len(alive), n, left())
        behind = [e for e in alive[front:] if e.average != incumbent]
        for entrant in behind:
            contest.mark(entrant, "set aside")
        if not behind:
            break
        alive = [entrant for entrant in alive if entrant not in behind]
    return alive, _good(contest, n)


def _how_many(alive: int, parts: int, budget: int) -> int:
    """Return how many go on: half, or as many as the budget carries to the end of the race."""
    most = max(2, math.ceil(alive / 2))
    while most > 2 and most * parts * math.ceil(math.log2(most)) > budget:
        most -= 1
    return most


def _good(contest: Contest, count: int) -> list[int]:
    """Return the first parts of the search, without those that fail for all."""
    bad = contest.board.bad
    return [part for part in contest.searched[:count] if part not in bad]


def _change(
    contest: Contest, alive: list[Entrant], parts: list[int], left: Callable[[], int], K: int
) -> Entrant:
    """Try changes of the winner; a better one is the next to be changed."""
    leader = contest.best(alive)
    random = torch.Generator().manual_seed(contest.problem.seed + 1)
    tried, changes = {entrant.average for entrant in alive}, 0
    variants = _variants(contest, alive, leader, K, random)
    with suppress(Spent):
        while left() >= len(parts) > 0 and (found := next(variants, None)) is not None:
            name, average = found
            if tuple(average) in tried:
                continue
            tried.add(tuple(average))
            changes += 1
            entrant = contest.enter(f"{name} {changes}", K or None, average)
            if _is_better(contest, entrant, leader, parts):
                leader = entrant
                variants = _variants(contest, alive, leader, K, random)
    return leader


def _is_better(contest: Contest, entrant: Entrant, leader: Entrant, parts: list[int]) -> bool:
    """Compare on these parts; give up as soon as it is behind."""
    board = contest.board
    for share in (8, 4, 2, 1):
        some = parts[: max(1, len(parts) // share)]
        board.ask([(entrant.average, some)])
        better = board.leads(entrant.average, leader.average, some)
        if float(better.mean()) <= 0:
            return False
    error = float(better.std()) / len(better) ** 0.5 if len(better) > 1 else 0.0
    return float(better.mean()) > CLEAR * error


def _variants(
    contest: Contest, alive: list[Entrant], leader: Entrant, K: int, random: torch.Generator
) -> Iterator[tuple[str, list[float]]]:
    """Yield means of those in front, more weight late or early; of a mask, swaps of checkpoints."""
    k = contest.k
    c = torch.tensor(leader.average, dtype=torch.float64)
    if K == AUTO:
        front = [torch.tensor(e.average, dtype=torch.float64) for e in alive[:3]]
        for other in front:
            if not torch.equal(other, c):
                yield "blend", ((c + other) / 2).tolist()
        if len(front) > 2:
            yield "blend", (sum(front) / len(front)).tolist()  # type: ignore[union-attr]
        for tilt in (TILT, -TILT):
            tilted = c * torch.exp(tilt * torch.linspace(-0.5, 0.5, k, dtype=torch.float64))
            yield "tilt", (tilted / tilted.sum()).tolist()
    chosen = [i for i, weight in enumerate(leader.average) if weight != 0]
    if max(leader.average) - min(leader.average[i] for i in chosen) < 1e-12:
        yield from (("swap", average) for average in swaps(leader.average, random))


register("race", Race)
