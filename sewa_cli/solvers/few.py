"""A search for few, dear evaluations: when one call scores an average on everything.

First moving averages, by two numbers: the length of the window and where it ends. A score is a
smooth function of their logarithms with noise on it, so a Gaussian process of what was found says
which window to try next (expected improvement, Jones et al. 1998). Then changes of the best: later
or earlier checkpoints weigh more, blends with the next best, single checkpoints added or dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor

from sewa_cli.methods import by_steps, mean_of
from sewa_cli.settings import AUTO
from sewa_cli.solvers.board import Spent, is_known
from sewa_cli.solvers.contest import Contest, Entrant

WINDOWS = 0.6  # of the evaluations, where there are enough to change the best too
FEWEST_CHANGES = 4
START = (0.5, 0.25, 1.0)  # windows at the end of the run that are tried first: powers of k
SCALES = (1.0, 2.0, 4.0)  # doublings of a window's length, or of its distance from the end
NOISE = (0.01, 0.1, 0.5)  # variance, as a share of that of the scores
SETTLED = 0.01  # expected improvement in standard deviations: not worth an evaluation
TILT = 1.0  # e^±1 from one end of the run to the other

Window = tuple[int, int]  # its length, and how many checkpoints there are after it


def search_few(contest: Contest, K: int) -> Entrant | None:
    """Spend the budget on windows and changes of the best; return the best."""
    board = contest.board
    found: dict[Window, Entrant] = {}
    with suppress(Spent):
        _ask(contest, [contest.last, contest.incumbent])
        total = board.total
        changes = total - int(WINDOWS * total)
        windows = total - (changes if changes >= FEWEST_CHANGES else 0)
        _search_windows(contest, _grid(contest.k, K), windows, found)
        _change(contest, K)
    return _best(contest)


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


def _best(contest: Contest) -> Entrant | None:
    return next(iter(_asked(contest)), None)


# ---- windows ---------------------------------------------------------------------------------


def _grid(k: int, K: int) -> list[Window]:
    lengths = _halves(k) if K == AUTO else [K]
    ends = [0, *_halves(k - 1)]
    return [(n, after) for n, after in product(lengths, ends) if n + after <= k]


def _halves(most: int) -> list[int]:
    """Return numbers from 1 to `most`, two for each doubling."""
    steps = range(2 * max(0, most.bit_length()) + 1)
    return sorted({min(most, round(2 ** (step / 2))) for step in steps if most > 0})


def _enter(contest: Contest, window: Window) -> Entrant:
    (n, after), k = window, contest.k
    end = k - after
    average = by_steps(mean_of(range(end - n, end), k), contest.problem.counts)
    if n == 1:
        return contest.enter(contest.problem.name_of(end - 1), None, average)
    if after == 0:
        return contest.enter("latest", n, average)
    return contest.enter(contest.problem.name_of(end - n, end - 1), n, average)


def _search_windows(
    contest: Contest, grid: list[Window], until: int, found: dict[Window, Entrant]
) -> None:
    board, k = contest.board, contest.k
    if (1, 0) in grid:
        found[1, 0] = contest.last
    first = {min(grid, key=lambda w: (w[1], abs(w[0] - k**power))) for power in START}
    while (left := min(until - board.spent, board.left)) > 0 and len(found) < len(grid):
        wanted = [window for window in first if window not in found]
        if not wanted and not (wanted := _promising(contest, grid, found)):
            return
        wanted = wanted[: min(left, board.abreast)]
        some = {window: _enter(contest, window) for window in wanted}
        found |= some
        _ask(contest, list(some.values()))


def _promising(contest: Contest, grid: list[Window], found: dict[Window, Entrant]) -> list[Window]:
    """Return as many windows as there are evaluations at a time, by expected improvement."""
    board = contest.board
    x = torch.tensor([_place(window) for window in found], dtype=torch.float64)
    y = torch.tensor([_rank(contest, e) for e in found.values()], dtype=torch.float64)
    known = y[y.isfinite()]
    if len(known) < 2:
        return [window for window in grid if window not in found][: board.abreast]
    # one that is far off must not flatten the differences between the good ones
    most = known.min() + 3 * (known.median() - known.min())
    y = y.nan_to_num(posinf=float(most)).clamp(max=float(most))
    if float(y.std()) == 0:
        return []
    y = (y - y.mean()) / y.std()
    open_ones = [window for window in grid if window not in found]
    places = torch.tensor([_place(window) for window in open_ones], dtype=torch.float64)
    chosen: list[Window] = []
    while open_ones and len(chosen) < board.abreast:
        mean, deviation = _predict(x, y, places)
        z = (y.min() - mean) / deviation
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        expected = deviation * (z * torch.special.ndtr(z) + density)
        at = int(expected.argmax())
        if float(expected[at]) < SETTLED:
            break
        chosen.append(open_ones.pop(at))
        # the next one is chosen as if this one were as predicted
        x, y = torch.cat([x, places[at : at + 1]]), torch.cat([y, mean[at : at + 1]])
        places = torch.cat([places[:at], places[at + 1 :]])
    return chosen


def _place(window: Window) -> list[float]:
    return [math.log2(window[0]), math.log2(1 + window[1])]


def _predict(x: Tensor, y: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation at places, by the scale and noise under which y is likeliest."""
    best, found = -math.inf, None
    for one, two, noise in product(SCALES, SCALES, NOISE):
        scale = torch.tensor([one, two], dtype=torch.float64)

        def kernel(a: Tensor, b: Tensor, scale: Tensor = scale) -> Tensor:
            return torch.exp(-0.5 * torch.cdist(a / scale, b / scale).square())

        root = torch.linalg.cholesky(kernel(x, x) + noise * torch.eye(len(x), dtype=torch.float64))
        solved = torch.cholesky_solve(y[:, None], root)
        likely = -0.5 * float(y @ solved[:, 0]) - float(root.diagonal().log().sum())
        if likely > best:
            across = kernel(x, places)
            mean = (across.T @ solved)[:, 0]
            rest = 1 - torch.linalg.solve_triangular(root, across, upper=False).square().sum(0)
            best, found = likely, (mean, rest.clamp(min=1e-9).sqrt())
    assert found is not None
    return found


# ---- changes of the best ---------------------------------------------------------------------


def _change(contest: Contest, K: int) -> None:
    """Try changes of the best; one that is better is the next to be changed."""
    random = torch.Generator().manual_seed(contest.problem.seed + 1)
    board, tried, count = contest.board, {*contest.entrants}, 0
    leader = None
    while board.left > 0 and (best := _best(contest)) is not None:
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
    others = [i for i, weight in enumerate(leader.average) if weight == 0]
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
    for pair in torch.randperm(len(chosen) * len(others), generator=random).tolist():
        out, new = chosen[pair // len(others)], others[pair % len(others)]
        yield "swap", mean_of([*(i for i in chosen if i != out), new], k)
