"""One solver step against the memory's bandwidth and against autograd: `python benchmarks/step.py`.

limit      a plain sum over W, twice: what reading W for mixing and for pulling back must cost
[k, P]     our layout: mix and pull back, for M = 1 and M = 4 samples
[P, k]     the other layout, the same products
autograd   back-propagation through the stacked checkpoints, tensor by tensor
rest       sampling, shift, Adam, history: a whole step less its two products, as a share of it
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import cast

import torch
from common import finish, race, timed
from torch import Tensor, nn

from sewa_cli.events import Events
from sewa_cli.objective.memo import Memo
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.solvers import Problem
from sewa_cli.solvers.gumbel import Gumbel
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.tiers import Dense

SIZES = [(10, 10**4), (100, 10**4), (1000, 10**4), (10, 10**5), (100, 10**5), (1000, 10**5)]
SIZES += [(10, 10**6), (100, 10**6), (10, 10**7), (100, 2 * 10**6)]
CPU = torch.device("cpu")


def trajectory_of(k: int, P: int) -> Dense:
    return Dense(torch.randn(k, P), FlatModel(nn.Linear(P, 1, bias=False), CPU).layout)


def ours(trajectory: Trajectory, M: int) -> Callable[[], object]:
    a = torch.rand(M, trajectory.k)
    out = torch.empty(M, trajectory.layout.size)
    G = torch.randn(M, trajectory.layout.size)

    def step() -> None:
        trajectory.mix(a, out=out)
        trajectory.pull_back(G)

    return step


def transposed(W: Tensor, M: int) -> Callable[[], object]:
    """W as [P, k]: flat = W a, grad_a = Wᵀ G."""
    a, G = torch.rand(W.shape[1], M), torch.randn(W.shape[0], M)
    out, pulled = torch.empty(W.shape[0], M), torch.empty(W.shape[1], M)

    def step() -> None:
        torch.mm(W, a, out=out)
        torch.mm(W.T, G, out=pulled)

    return step


def naive(W: Tensor, parts: int = 10) -> Callable[[], object]:
    """Ten stacked tensors [k, …], mixed by broadcasting, autograd through all of it."""
    stacked = [part.contiguous() for part in W.chunk(parts, dim=1)]
    upstream = [torch.randn(part.shape[1]) for part in stacked]
    a = torch.rand(W.shape[0], requires_grad=True)

    def step() -> None:
        mixed = [(a[:, None] * part).sum(0) for part in stacked]
        torch.autograd.grad(mixed, a, upstream)

    return step


class Free:
    """An objective that costs nothing."""

    memo = Memo()

    def __init__(self, gradient: Tensor) -> None:
        self._answer = torch.zeros(()), gradient

    def batches(self) -> Iterator[int]:
        return repeat(0)

    def gradient(self, *_: object) -> tuple[Tensor, Tensor]:
        return self._answer


def rest_share(trajectory: Trajectory, M: int = 2, iterations: int = 10) -> float:
    """Return the share of a step that is neither the model, mixing nor pulling back."""
    objective = Free(torch.randn(trajectory.layout.parameters))
    problem = Problem(cast(Objective, objective), trajectory, 0, 0, Events())
    solver = Gumbel(Gumbel.Settings(iterations=iterations, samples=M))
    shares = []
    for _ in range(5):
        spent = {"products": 0.0}
        with (
            timed(Trajectory, "mix", spent, "products"),
            timed(Trajectory, "pull_back", spent, "products"),
        ):
            start = time.perf_counter()
            solver.choose(problem, trajectory.k // 10 or 1)
            whole = time.perf_counter() - start
        shares.append(1 - spent["products"] / whole)
    return min(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    rows = []
    for k, P in SIZES:
        trajectory = trajectory_of(k, P)
        W = trajectory.W
        best = race(
            {
                "limit": lambda W=W: (W.sum(), W.sum()),  # type: ignore[misc]
                "ours": ours(trajectory, 1),
                "ours4": ours(trajectory, 4),
                "naive": naive(W),
            },
            given.rounds,
        )
        other = W.T.contiguous()
        turned = race({"1": transposed(other, 1), "4": transposed(other, 4)}, given.rounds)
        del other
        rows.append(
            {
                "k": k,
                "P": f"{P:.0e}",
                "limit ms": 1e3 * best["limit"],
                "GB/s": 2 * 4 * k * P / best["limit"] / 1e9,
                "M=1 / limit": best["ours"] / best["limit"],
                "M=4 / M=1": best["ours4"] / best["ours"],
                "[P, k] M=1 / limit": turned["1"] / best["limit"],
                "[P, k] M=4 / ours M=4": turned["4"] / best["ours4"],
                "autograd / M=1": best["naive"] / best["ours"],
                "rest of a step": f"{100 * rest_share(trajectory):.1f} %",
            }
        )
    finish("step", rows, given.json)


if __name__ == "__main__":
    main()
