"""Which selection examples take part: as many as there is memory and time to keep outputs of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.objective.classes import Targets
from sewa_cli.objective.tree import Nest, rows, take_rows
from sewa_cli.objective.units import Sample
from sewa_cli.rng import seeded
from sewa_cli.settings import Count, Positive, WholeNumber
from sewa_cli.solvers import Problem, Sizes, Solver
from sewa_cli.solvers.outputs.digest import LOGITS, WORTHWHILE, Logits, keep_digest
from sewa_cli.solvers.outputs.predictions import KeptOutputs, bytes_of
from sewa_cli.solvers.outputs.whole import flatten, keep_whole, run_model
from sewa_cli.text import size

# Examples without which nothing is learned, where there are more: five folds of six each. Fewer
# would choose by luck, and a share of all says nothing: a hundredth of 10⁶ is plenty.
FEWEST = 32
# Numbers for each checkpoint, for the sake of time. Of a digest more, as its loss is in closed form
# and needs no call of the user's: enough for what `task: huggingface` reads by default, 2,000
# examples of 128 tokens with 65 numbers each
MOST, MOST_DIGESTED = 1_000_000, 20_000_000


class PredictingSettings(Solver.Settings):
    """Settings of every solver that predicts outputs."""

    h: Annotated[Positive, Field(le=1)] = Field(
        0.1, description="how far towards each checkpoint the model is evaluated"
    )
    outputs: Count | None = Field(
        None,
        description="outputs kept for each checkpoint (default 1,000,000, of digests 20,000,000)",
    )
    largest: Count = Field(
        32, description="with many classes, the largest logits kept for each target"
    )
    samples: Count = Field(32, description="with many classes, other logits sampled")
    folds: Annotated[WholeNumber, Field(ge=2, le=10)] = Field(
        5, description="folds of cross-validation"
    )

    @property
    def digested(self) -> int:
        """Return the numbers of a digest for each target."""
        return 1 + self.largest + self.samples

    def digests(self, classes: float) -> bool:
        return classes >= WORTHWHILE * self.digested

    def most_numbers(self, is_digest: bool) -> int:
        return self.outputs or (MOST_DIGESTED if is_digest else MOST)

    def fit(self, sizes: Sizes, held: int) -> tuple[int, float]:
        """Return the bytes of the predictions next to what is held, and the share of examples."""
        is_digest, memory_left = self.digests(sizes.classes), max(1, sizes.memory_left - held)
        every = max(1, sizes.targets * self.digested if is_digest else sizes.numbers)
        least = bytes_of(sizes.k, 1, torch.bfloat16)
        numbers = min(every, self.most_numbers(is_digest), memory_left // least)
        wide = bytes_of(sizes.k, numbers, torch.float32)
        return wide if wide <= memory_left else numbers * least, numbers / every


@dataclass(frozen=True)
class Examples:
    """The batches that take part; `targets` of each, if a digest of its logits is kept."""

    batches: Sequence[Nest]
    of_rows: int  # that the selection data have
    targets: Sequence[Targets] | None

    def keep(
        self, problem: Problem, settings: PredictingSettings, flat: Tensor, splits: bool
    ) -> tuple[KeptOutputs, Tensor]:
        """Keep the outputs around the weights `flat`; return these too, [O]."""
        objective = problem.objective
        objective.model.set(flat)
        objective.model.module.eval()
        if self.targets is None:
            return keep_whole(objective, self.batches, splits, problem.seed)
        at_once = max(min(LOGITS, problem.memory_left // 16), 1)
        logits = Logits(objective, self.batches, self.targets, problem.seed, at_once)
        return keep_digest(logits, settings.largest, settings.samples, flat)


def settle(
    problem: Problem, settings: PredictingSettings, section: str
) -> tuple[Problem, Examples]:
    """Choose the examples; they are the selection data of the problem that is returned.

    If not all fit, they are drawn at random, and what is left out is warned of. `section` of
    sewa.yaml has the settings.
    """
    objective = problem.objective
    objective.model.module.eval()
    with seeded(objective.seed):
        batches = [batch for batch in objective.selection if rows(batch) > 0]
    if not batches:
        raise TaskError("selection_data() gives no examples; return one batch or more")
    has_targets = objective.classes is not None
    targets = _digestible(problem, batches, settings) if has_targets else None
    per_row = _numbers(problem, batches, targets, settings)
    n, every, is_digest = len(per_row), int(per_row.sum()), targets is not None
    if every == 0:
        raise TaskError("predict() gives no floating-point tensors; return logits, not classes")
    most = settings.most_numbers(is_digest)
    one = bytes_of(problem.trajectory.k, 1, torch.bfloat16)  # byte of the smallest predictions
    order = torch.randperm(n, generator=torch.Generator().manual_seed(problem.seed))
    total = per_row[order].cumsum(0)
    fitting = int((total <= problem.memory_left // one).sum())
    taken = min(fitting, max(int((total <= most).sum()), FEWEST))
    if taken < min(FEWEST, n):
        helps = "" if is_digest else ", say what its targets() are, if it has many classes,"
        raise ConfigError(
            f"memory: the outputs of {problem.trajectory.k} checkpoints need "
            f"{size(one * every // n)} for each of the {n} selection examples, and "
            f"{min(FEWEST, n)} at least do not fit into {size(problem.memory_left)}; "
            f"raise --memory{helps} or choose among fewer checkpoints"
        )
    if taken == n:
        return problem, Examples(batches, n, targets)
    remedies = [f"--set {section}.outputs={every}"] * (every > most)
    if (lacking := one * every - problem.memory_left) > 0:
        remedies.append(f"{size(lacking)} more --memory")
    problem.events.warn(
        f"{taken} of the {n} selection examples are used, here and in every selection loss; "
        f"{' and '.join(remedies)} would keep all"
    )
    drawn = torch.zeros(n, dtype=torch.bool)
    drawn[order[:taken]] = True
    parts = torch.split(drawn, list(map(rows, batches)))
    some = [
        take_rows(batch, rows(batch), part.nonzero()[:, 0])
        for batch, part in zip(batches, parts, strict=True)
        if part.any()
    ]
    objective = replace(objective, selection=Sample.of(some, n))
    problem = replace(problem, objective=objective)
    return problem, Examples(some, n, _digestible(problem, some, settings) if targets else None)


def _digestible(
    problem: Problem, batches: Sequence[Nest], settings: PredictingSettings
) -> list[Targets] | None:
    """Return the targets of each batch, if the task names them and the classes are many."""
    classes = problem.objective.classes
    assert classes is not None
    found = [problem.objective.targets(batch) for batch in batches]
    if any(one is None for one in found) or not settings.digests(classes.width):
        return None
    return [one for one in found if one is not None]


def _numbers(
    problem: Problem,
    batches: Sequence[Nest],
    targets: Sequence[Targets] | None,
    settings: PredictingSettings,
) -> Tensor:
    """Count the numbers that each example takes, [n], whatever weights are in the model."""
    if targets is not None:
        pairs = zip(batches, targets, strict=True)
        counts = [torch.bincount(one.rows.cpu(), minlength=rows(batch)) for batch, one in pairs]
        return settings.digested * torch.cat(counts)
    found = []
    for batch in problem.events.over("counting outputs", batches, len(batches)):
        numbers, n = len(flatten(run_model(problem.objective, batch, problem.seed))), rows(batch)
        found.append(torch.full((n,), -(-numbers // n)))
    return torch.cat(found)
