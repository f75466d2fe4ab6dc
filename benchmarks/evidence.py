"""How many parts a duel takes, and how often noise wins one: the tables of docs/how-to/metrics.md.

`python benchmarks/evidence.py`; a few minutes. Differences of two averages on the same parts are
drawn, and judged as a duel judges them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from sewa_cli.stats import is_shown

RUNS = 2000
DUELS = (10, 20, 40, 75, 150, 300, 600)  # parts


def noises(generator: torch.Generator) -> dict[str, Callable[[int], Tensor]]:
    """Differences [RUNS, n] of two averages that are as good as each other."""

    def normal(n: int) -> Tensor:
        return torch.randn(RUNS, n, dtype=torch.float64, generator=generator)

    def rare(n: int) -> Tensor:
        wins = torch.rand(RUNS, n, generator=generator) < 0.9
        return torch.where(wins, 1.0, -9.0).double()

    return {
        "normal": normal,
        "right or wrong": lambda n: (normal(n) > 0.3).double() - (normal(n) > 0.3).double(),
        "Cauchy": lambda n: normal(n) / normal(n),
        "now and then a fall: wins by 1 in nine of ten, loses by 9": rare,
        "a long tail of losses (lognormal)": lambda n: torch.e**0.5 - normal(n).exp(),
    }


def shares(draw: Callable[[int], Tensor]) -> list[str]:
    """Return the share of duels that are won, by their number of parts."""
    return [f"{sum(is_shown(one) for one in draw(n)) / RUNS:.1%}" for n in DUELS]


def main() -> None:
    out = sys.stdout.write
    made = noises(torch.Generator().manual_seed(0))
    head = " | ".join(f"{n} parts" for n in DUELS)
    out(f"| difference, in deviations of a part | {head} |\n|---:{'|---:' * len(DUELS)}|\n")
    for shift in (0.1, 0.2, 0.3, 0.5, 1.0):

        def shifted(n: int, shift: float = shift) -> Tensor:
            return made["normal"](n) + shift

        out(f"| {shift} | {' | '.join(shares(shifted))} |\n")
    out(f"\n| no difference | {head} |\n|---{'|---:' * len(DUELS)}|\n")
    for name, draw in made.items():
        out(f"| {name} | {' | '.join(shares(draw))} |\n")


if __name__ == "__main__":
    main()
