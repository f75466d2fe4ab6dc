"""Problems that solvers can be tested on without a disk: a linear model and squared error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sewa_cli.events import Events
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.objective.tree import rows
from sewa_cli.objective.units import Grouping, groups_of
from sewa_cli.solvers import Problem
from sewa_cli.solvers.outputs.examples import PredictingSettings, settle
from sewa_cli.solvers.outputs.predictions import Predictions, mean, predict
from sewa_cli.trajectory.tiers import Dense

NOISE = 0.5


def squared(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs - batch[1]) ** 2).mean()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def problem_of(
    W: Tensor,
    x: Tensor,
    y: Tensor,
    loss: Callable[..., Tensor] = squared,
    seed: int = 0,
    *,
    net: nn.Module | None = None,
    batch: int = 25,
    memory_left: int = 10**9,
    label_groups: Callable[[Any], Sequence[int]] | None = None,
) -> Problem:
    """Make a problem with the checkpoints W [k, P] of a network, by default a linear one."""
    model = FlatModel(net or nn.Linear(x.shape[1], 1), torch.device("cpu"))
    batches = list(zip(torch.split(x, batch), torch.split(y, batch), strict=True))
    objective = Objective(
        model, lambda m, b: m(b[0]), loss, backward, batches, label_groups=label_groups
    )
    return Problem(objective, Dense(W, model.layout), memory_left, seed, Events())


def random_problem(examples: int = 60, k: int = 9, seed: int = 0, **options: Any) -> Problem:
    """Scatter checkpoints around the truth; labels have noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 5, generator=generator)
    truth = torch.randn(5, generator=generator)
    y = (x @ truth)[:, None] + NOISE * torch.randn(examples, 1, generator=generator)
    W = torch.cat([truth, torch.zeros(1)]) + 0.7 * torch.randn(k, 6, generator=generator)
    return problem_of(W, x, options.pop("labels", y), seed=seed, **options)


def predicted(
    problem: Problem, splits: bool = True, base: Tensor | None = None, **settings: Any
) -> Predictions:
    """Predict around an average, by default the mean of all."""
    keep = PredictingSettings(**settings)
    problem, examples = settle(problem, keep, "linear")
    k, objective = problem.trajectory.k, problem.objective
    base = mean(range(k), k) if base is None else base
    flat = problem.trajectory.mix_few(base.tolist()).clone()
    frame, at_base = examples.keep(problem, keep, flat, splits)
    batches = examples.batches
    grouping = Grouping.make(
        list(map(rows, batches)), splits, groups_of(batches, objective.label_groups)
    )
    return predict(
        problem, frame, at_base, flat, base, grouping, keep.h, examples.of_rows, lambda *_: None
    )


def random_averages(k: int, count: int = 4, seed: int = 0) -> Tensor:
    """Draw coefficients [count, k] from the simplex."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(count, k, generator=generator), 1).double()
