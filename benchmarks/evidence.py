"""How many parts a duel takes, and how often noise wins one: the tables of docs/metrics.md.

`python benchmarks/evidence.py`; a minute or two. Differences of two averages on the same parts are
drawn, and looked at after each part, as an impatient person would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from sewa_cli.objective.evidence import RATES, SURE, evidence

RUNS, PARTS = 2000, 1000


def paths(differences: Tensor) -> Tensor:
    """E after each part [runs, n] of differences [runs, n]: `evidence` of every prefix, at once."""
    count = torch.arange(1, differences.shape[1] + 1, dtype=torch.float64)
    u = differences / ((differences**2).cumsum(1) / count).sqrt().clamp_min(1e-300)
    found = torch.zeros_like(u)
    for rate in RATES:
        x = (rate * u).abs()
        log_cosh = x + torch.nn.functional.softplus(-2 * x) - log(2)
        found += torch.exp((rate * u - log_cosh).cumsum(1).clamp(-700, 500)) / len(RATES)
    return found


def noises(generator: torch.Generator) -> dict[str, Callable[[], Tensor]]:
    shape = RUNS, PARTS

    def normal() -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return {
        "normal": normal,
        "right or wrong": lambda: (normal() > 0.3).double() - (normal() > 0.3).double(),
        "now and then a fall (lognormal)": lambda: normal().exp() ** 2 - normal().exp() ** 2,
        "Cauchy": lambda: normal() / normal(),
    }


def main() -> None:
    out = sys.stdout.write
    generator = torch.Generator().manual_seed(0)
    made = noises(generator)
    some = made["normal"]()[:3]
    assert all(abs(float(paths(d[None])[0, -1]) / evidence(d) - 1) < 1e-9 for d in some)
    out("| difference, in deviations of a part | parts until it is shown, half of the cases ")
    out("| nine of ten |\n")
    out("|---:|---:|---:|\n")
    for shift in (0.1, 0.2, 0.3, 0.5, 1.0):
        shown = paths(made["normal"]() + shift) >= SURE
        first = torch.where(shown.any(1), shown.double().argmax(1) + 1, PARTS + 1).double()
        half, most = (int(first.quantile(q)) for q in (0.5, 0.9))
        words = [f"{n:,}" if n <= PARTS else f"more than {PARTS:,}" for n in (half, most)]
        out(f"| {shift} | {words[0]} | {words[1]} |\n")
    out("\n| noise | a winner where there is none, looked at after each of 1,000 parts |\n")
    out("|---|---:|\n")
    for name, draw in made.items():
        share = float((paths(draw()) >= SURE).any(1).double().mean())
        out(f"| {name} | {share:.2%} |\n")


if __name__ == "__main__":
    main()
