"""The baselines: averages that look at nothing but the order of the checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sewa_cli.methods import Coefficients, Run, parse_one
from sewa_cli.settings import AUTO

Name = tuple[str, int | None]  # a method as one would write it, and its K
RATIO = 1.6  # from one window to the next
POWERS = (1, 3, 8)
STARTS = (0.5, 0.75, 0.9)
EACH = 10  # of so few of the latest, one more or less is another average


def windows(k: int) -> list[int]:
    """1, 2, 3, 4, 7, 10, 17 … below k."""
    found, window = [1], 1.0
    while round(window := window * RATIO) < k:
        found += [round(window)] if round(window) > found[-1] else []
    return found if k > 1 else []


def grid(k: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … below k."""
    steps = (digit * 10**power for power in range(len(str(k))) for digit in (1, 2, 5))
    return [K for K in steps if k > K]


def moving_averages(k: int) -> list[Name]:
    """Name moving averages, from the newest checkpoint alone to the mean of all.

    Where a run still moves a short window is good, where it has settled the longest.
    """
    return [
        ("last", None),
        *(("ema-window", K) for K in (*windows(k)[1:], k, 2 * k) if K > 1),
        ("uniform", None),
    ]


def baselines(k: int, K: int = AUTO) -> dict[Name, Coefficients]:
    """Return moving averages, and `latest` and `lawa` with K, or with a few K.

    Where two are the same average, the one that is named first is returned.
    """
    sizes = grid(k)[1:] if K == AUTO else [K]
    return _distinct(k, [*moving_averages(k), *((m, n) for m in ("latest", "lawa") for n in sizes)])


def _distinct(k: int, names: Iterable[Name]) -> dict[Name, Coefficients]:
    run, found = Run(k), dict[Name, Coefficients]()
    for name in names:
        coefficients = parse_one(name[0])(run, name[1])[0]
        if coefficients not in found.values():
            found[name] = coefficients
    return found


def family(k: int, K: int = AUTO, *, coarse: bool = False) -> dict[Name, Coefficients]:
    """Return the averages of a contest: these, `wsm`, power decays, `swa`, and more `latest`.

    Where two are the same average, the one that is named first. `K`: so many are to be chosen, and
    simple averages of as many are to beat. `coarse`: `latest` at fewer K, where asking is dear.
    """
    peers: list[Name] = [] if K == AUTO else [("latest", K), ("lawa", K)]
    return _distinct(k, [*moving_averages(k), *_others(k, coarse), *peers])


def _others(k: int, coarse: bool) -> Iterator[Name]:
    more = set() if coarse else {*range(2, min(EACH + 1, k)), *grid(k)[1:]}
    yield from (("latest", K) for K in sorted(more.union(windows(k)[1:])))
    yield from (("lawa", K) for K in grid(k)[1:])
    yield from (("wsm", K) for K in grid(k)[2:])
    yield from ((f"power:gamma={gamma}", None) for gamma in POWERS)
    yield from ((f"swa:start={start}", None) for start in STARTS)
