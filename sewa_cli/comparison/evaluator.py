"""The run as methods see it, and the judge of what they propose.

No average is evaluated twice, whoever asks for it; every row is charged in full for what it asked,
so that its cost is what the method would have cost alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sewa_cli.config import AUTO
from sewa_cli.dtypes import Array
from sewa_cli.errors import TaskError
from sewa_cli.methods import Run, checked
from sewa_cli.objective.objective import UnitLosses, cycle
from sewa_cli.objective.scorer import Scales
from sewa_cli.rng import seeded
from sewa_cli.session.session import Bench
from sewa_cli.solvers import Solution
from sewa_cli.solvers.learning import learn
from sewa_cli.solvers.linear import Surrogate, scout
from sewa_cli.solvers.linear import relax as linear
from sewa_cli.solvers.linear.rounds import Linear
from sewa_cli.solvers.linear.streaming import judge_of
from sewa_cli.text import finite
from sewa_cli.trajectory import Trajectory
from sewa_cli.trajectory.placement import Placed, cap_of

T = TypeVar("T")


@dataclass(frozen=True)
class Meter:
    forward: int = 0
    backward: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Meter) -> Meter:
        return Meter(
            self.forward + other.forward,
            self.backward + other.backward,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Judged:
    """One average, evaluated to the end."""

    selection_loss: float | None
    heldout: UnitLosses | None
    metrics: dict[str, float | None] | None
    statistics: dict[str, Array]  # of BatchNorm, as they were recomputed for it


class Ledger:
    """Does each piece of work once, and charges it to every row that asks for it."""

    def __init__(self, bench: Bench, trajectory: Trajectory) -> None:
        self._bench = bench
        self._trajectory = trajectory
        self._done: dict[tuple[object, ...], tuple[Any, Meter]] = {}
        self._charged: set[tuple[object, ...]] = set()
        self._row = Meter()

    def once(self, kind: str, key: Sequence[float], work: Callable[[], T]) -> T:
        # two averages that differ in the last bit of a coefficient only are one
        full = (kind, *(round(x, 12) for x in key))
        if full not in self._done:
            with self._metered() as spent:
                value = work()
            self._done[full] = (value, spent[0])
        value, cost = self._done[full]
        if full not in self._charged:
            self._charged.add(full)
            self._row = self._row.plus(cost)
        return value

    def charge(self, work: Callable[[], T]) -> T:
        with self._metered() as spent:
            value = work()
        self._row = self._row.plus(spent[0])
        return value

    def next_row(self) -> Meter:
        """What the row that ends here has cost."""
        cost, self._row = self._row, Meter()
        self._charged.clear()
        return cost

    def count(self, kind: str) -> int:
        return sum(key[0] == kind for key in self._done)

    @contextmanager
    def _metered(self) -> Iterator[list[Meter]]:
        passes, start = self._bench.objective.passes, time.perf_counter()
        before = passes.forward, passes.backward, self._trajectory.bytes_moved
        spent: list[Meter] = []
        yield spent
        spent.append(
            Meter(
                passes.forward - before[0],
                passes.backward - before[1],
                self._trajectory.bytes_moved - before[2],
                time.perf_counter() - start,
            )
        )


class Court:
    """The run as methods see it, and the judge of what they propose."""

    def __init__(self, bench: Bench, placed: Placed) -> None:
        trajectory, used = placed.trajectory, placed.used
        self.scales = Scales(bench, trajectory, used)
        self.ledger = Ledger(bench, trajectory)
        self.fast = bench.config.compare.fast
        self._bench = bench
        self._trajectory = trajectory
        self._room = cap_of(bench)[0] - placed.placement.planned_bytes
        steps = [c.step for c in used if c.step is not None]
        self._stream = cycle(bench.task.selection_data, bench.model.device)
        self.run = Run(
            k=len(used),
            steps=steps if len(steps) == len(used) else None,
            seed=bench.config.seed,
            loss=self.predicted_loss if self.fast else self.selection_loss,
            gradient=self.predicted_gradient if self.fast else self.gradient,
            learn=self.learn_from_cache if self.fast else self.learn,
        )

    def close(self) -> None:
        """Let go of the checkpoints now: the court and its run hold each other, and with them W."""
        del self.run

    def begin_row(self) -> None:
        """Every method sees the selection batches from the start, whoever came before it."""
        self._stream = cycle(self._bench.task.selection_data, self._bench.model.device)

    def learn(self, K: int) -> Solution:
        def work() -> Solution:
            with seeded(self._bench.config.seed):
                if self._bench.config.solver == "gumbel":
                    return learn(self._bench, self._trajectory, K)
                found = self._linear().choose(K).solution
                assert found is not None  # K is a number here
                return found

        if self._bench.config.solver == "linear":
            self._linear()  # charged to this row, whoever had it made
        return self.ledger.once("learn", [K], work)

    # ---- over the cache of outputs -----------------------------------------------------------

    def _linear(self) -> Linear:
        """One cache for every K and every method; a second one, around an average, beside it."""

        def work() -> Linear:
            judge = judge_of(self._bench)
            scouted = scout(self._trajectory.rows(), self._trajectory.k, judge)
            room = self._room if self.fast else self._room // 2
            solver = Linear(self._bench, self._trajectory, scouted, room, keep=True)
            solver.begin(AUTO)
            return solver

        return self.ledger.once("survey", [], work)

    def _cache(self) -> Surrogate:
        first = self._linear().first
        assert first is not None  # it is kept
        return first

    def learn_from_cache(self, K: int) -> Solution:
        cache = self._cache()
        return self.ledger.once(
            "learn", [K], lambda: linear.solve(cache, K, self._bench.config.linear)
        )

    def predicted_loss(self, coefficients: Sequence[float]) -> float:
        cache = self._cache()
        c = checked(coefficients, self.run.k, "run.loss")
        mixed = torch.tensor(c, dtype=torch.float64)
        return self.ledger.once("predict", c, lambda: cache.loss(cache.mix(mixed)))

    def cached_loss(self, coefficients: Sequence[float]) -> float:
        """The true loss on the rows that the predicted one is of, BatchNorm as it was mixed."""
        cache = self._cache()
        if cache.size.rows == cache.size.of_rows:
            return self.selection_loss(coefficients)

        def work() -> float:
            self.scales.load(coefficients)
            return cache.loss(cache.true_outputs())

        return self.ledger.once("cached", coefficients, work)

    def predicted_gradient(self, coefficients: Sequence[float]) -> tuple[float, list[float]]:
        cache = self._cache()
        c = torch.tensor(list(coefficients), dtype=torch.float64)
        loss, gradient = self.ledger.charge(lambda: cache.loss_and_gradient(c))
        return loss, gradient.tolist()

    def selection_loss(self, coefficients: Sequence[float]) -> float:
        """Of the average as it is mixed, BatchNorm statistics averaged along."""

        c = checked(coefficients, self.run.k, "run.loss")

        def work() -> float:
            with seeded(self._bench.config.seed):
                self.scales.load(c)
                loss = self.scales.selection_loss()
            return float("nan") if loss is None else loss

        return self.ledger.once("loss", c, work)

    def gradient(self, coefficients: Sequence[float]) -> tuple[float, list[float]]:
        def work() -> tuple[float, list[float]]:
            a = torch.tensor([list(coefficients)], dtype=torch.float64)
            batch = next(self._stream)
            flat = self._trajectory.mix(a)[0]
            try:
                loss, gradient = self._bench.objective.loss_and_gradient(flat, [batch])
            except ValueError as error:
                raise TaskError(f"selection_data(): {error}") from error
            return float(loss), self._trajectory.pull_back(gradient[None])[0].tolist()

        return self.ledger.charge(work)

    def judge(self, coefficients: Sequence[float]) -> Judged:
        """Selection loss, held-out losses by row and metrics; BatchNorm alike for all."""
        scales = self.scales
        # without BatchNorm the loss that methods see is the loss that is reported
        known = None if scales.recomputes_all else self.selection_loss(coefficients)

        def work() -> Judged:
            # the same random numbers for each: shuffled data come in the same order, so that
            # differences stay paired
            with seeded(self._bench.config.seed):
                scales.load(coefficients)
                selection, statistics = known, {}
                if scales.recomputes_all:
                    scales.recompute()
                    statistics = scales.recomputed()
                    selection = scales.selection_loss()
            with seeded(self._bench.config.seed):
                heldout, metrics = scales.heldout_units(), scales.metrics()
            return Judged(finite(selection), heldout, metrics, statistics)

        return self.ledger.once("judge", coefficients, work)
