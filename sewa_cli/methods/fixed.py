"""Averages that look at nothing but the order of the checkpoints, and the baselines among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import sqrt

from sewa_cli.methods import Coefficients, Run, mean_of, method, parse_one
from sewa_cli.settings import AUTO


@method()
def last(run: Run) -> Coefficients:
    """The newest checkpoint alone: what training itself gives.

    c_k = 1.
    """
    return mean_of([run.k - 1], run.k)


@method()
def uniform(run: Run) -> Coefficients:
    """The mean of all k checkpoints.

    c_i = 1/k. Polyak and Juditsky 1992.
    """
    return mean_of(range(run.k), run.k)


@method()
def lawa(run: Run, K: int) -> Coefficients:
    """K checkpoints at equal intervals, the newest among them.

    c_i = 1/K for i = ⌊jk/K⌋, j = 1…K. LAWA, Kaddour 2022.
    """
    run.check(K)
    return mean_of(((j + 1) * run.k // K - 1 for j in range(K)), run.k)


@method()
def latest(run: Run, K: int) -> Coefficients:
    """The last K checkpoints, equally.

    c_i = 1/K for i > k − K.
    """
    run.check(K)
    return mean_of(range(run.k - K, run.k), run.k)


@method()
def swa(run: Run, *, start: float = 0.75, every: int = 1) -> Coefficients:
    """The mean of every n-th after `start`.

    c_i equal for step_i > start · step_k, in strides of `every` from the newest. SWA, Izmailov
    et al. 2018.
    """
    if not 0 <= start < 1 or every < 1:
        raise ValueError(f"swa: start must lie in [0, 1) and every be 1 or more: {start}, {every}")
    steps = run.steps if run.steps is not None else range(1, run.k + 1)
    late = [i for i, step in enumerate(steps) if step > start * steps[-1]] or [run.k - 1]
    return mean_of(late[::-1][::every], run.k)


def decaying(k: int, decay: float) -> Coefficients:
    """c_1 = d^{k−1}, c_i = (1 − d)·d^{k−i}."""
    weights = [(1 - decay) * decay ** (k - 1 - i) for i in range(k)]
    weights[0] = decay ** (k - 1)
    return weights


@method()
def ema(run: Run, *, decay: float = 0.9) -> Coefficients:
    """Exponential moving average with a fixed decay.

    c_1 = d^{k−1}, c_i = (1 − d)·d^{k−i}.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"ema: the decay must lie in [0, 1), found {decay}")
    return decaying(run.k, decay)


@method()
def ema_window(run: Run, K: int) -> Coefficients:
    """Moving average, as old on average as the mean of the last K.

    `ema` with d = (K − 1)/(K + 1).
    """
    return decaying(run.k, (K - 1) / (K + 1))


@method()
def power(run: Run, *, gamma: float = 3.0) -> Coefficients:
    """Coefficients that grow as a power of the position.

    c_i ∝ i^γ, i = 1…k. Karras et al. 2024 (EDM2).
    """
    if not 0 <= gamma <= 1000:
        raise ValueError(f"power: gamma must lie in [0, 1000], found {gamma}")
    weights = [((i + 1) / run.k) ** gamma for i in range(run.k)]
    return [weight / sum(weights) for weight in weights]


@method()
def random(run: Run, K: int, *, draws: int = 5) -> list[Coefficients]:
    """K checkpoints at random, several times: mean and spread.

    c_i = 1/K on a random subset. The paper's control for `sewa`.
    """
    run.check(K)
    if draws < 1:
        raise ValueError(f"random: draws must be 1 or more, found {draws}")
    import torch  # averaging by the others goes without

    generator = torch.Generator().manual_seed(run.seed)
    order = [torch.randperm(run.k, generator=generator)[:K].tolist() for _ in range(draws)]
    return [mean_of(chosen, run.k) for chosen in order]


@method()
def wsm(run: Run, K: int, *, decay: str = "1-sqrt") -> Coefficients:
    """The last K, as if the learning rate had decayed.

    c_j = r_j − r_{j+1}, r_j = 1 − j/K (`linear`) or 1 − √(j/K) (`1-sqrt`), j = 0…K. WSM, Tian
    et al. 2025.
    """
    if decay not in ("linear", "1-sqrt"):
        raise ValueError(f"wsm: decay must be linear or 1-sqrt, found {decay!r}")
    run.check(K)
    factors = [1 - (j / K if decay == "linear" else sqrt(j / K)) for j in range(K + 1)]
    weights = [factors[j] - factors[j + 1] for j in range(K)]
    return [0.0] * (run.k - K) + weights


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


def baselines(k: int, K: int = AUTO, counts: Sequence[int] = ()) -> dict[Name, Coefficients]:
    """Return moving averages, and `latest` and `lawa` with K, or with a few K.

    Where two are the same average, the first name is returned. `counts`: see `Run`.
    """
    sizes = grid(k)[1:] if K == AUTO else [K]
    others = ((name, n) for name in ("latest", "lawa") for n in sizes)
    return _distinct(Run(k, counts=counts), [*moving_averages(k), *others])


def _distinct(run: Run, names: Iterable[Name]) -> dict[Name, Coefficients]:
    found = dict[Name, Coefficients]()
    for name in names:
        coefficients = parse_one(name[0])(run, name[1])[0]
        if coefficients not in found.values():
            found[name] = coefficients
    return found


def family(
    k: int, K: int = AUTO, *, coarse: bool = False, counts: Sequence[int] = ()
) -> dict[Name, Coefficients]:
    """Return the averages of a contest: these, `wsm`, power decays, `swa`, and more `latest`.

    Where two are the same average, the first name is kept. `K`: the number to be chosen, and
    simple averages of as many are to beat. `coarse`: `latest` at fewer K, where asking is dear.
    """
    peers: list[Name] = [] if K == AUTO else [("latest", K), ("lawa", K)]
    names = [*moving_averages(k), *_others(k, coarse), *peers]
    return _distinct(Run(k, counts=counts), names)


def _others(k: int, coarse: bool) -> Iterator[Name]:
    more = set() if coarse else {*range(2, min(EACH + 1, k)), *grid(k)[1:]}
    yield from (("latest", K) for K in sorted(more.union(windows(k)[1:])))
    yield from (("lawa", K) for K in grid(k)[1:])
    yield from (("wsm", K) for K in grid(k)[2:])
    yield from ((f"power:gamma={gamma}", None) for gamma in POWERS)
    yield from ((f"swa:start={start}", None) for start in STARTS)
