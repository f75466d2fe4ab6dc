"""`--solver linear`: the choice is made in output space, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sewa_cli.config import AUTO
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.methods import Coefficients, mean_of
from sewa_cli.session.session import Bench
from sewa_cli.solvers import Solution
from sewa_cli.solvers.chosen import Chosen, Round, cache_of
from sewa_cli.solvers.crossvalidate import LEARNED, Budget, choose_budget, grid
from sewa_cli.solvers.linear import Labels, Scouted, Surrogate
from sewa_cli.solvers.linear import relax as linear
from sewa_cli.solvers.linear.survey import (
    Name,
    Survey,
    predicted_loss,
    simple_average,
    simple_averages,
)
from sewa_cli.solvers.stability import Stability, most_frequent, resample
from sewa_cli.trajectory import Remembered, Trajectory

NOISE = (
    "the loss on the selection data cannot be told from that with their rows mixed up, so the "
    "labels say nothing about these checkpoints"
)
UNSEEN = (
    "loss() gives the same whatever rows the batch has: if the model computes its own loss, return "
    "its outputs from predict() and compute the loss in loss(), or a prediction is worth little"
)
SMALL = 0.01  # of the loss: an error that nobody would act on


class Linear:
    """Masks chosen from the outputs of all checkpoints."""

    def __init__(
        self,
        bench: Bench,
        trajectory: Trajectory,
        scouted: Scouted,
        room: int,
        keep: bool = False,
    ) -> None:
        """`keep`: the first cache, for another K; and nothing is resampled."""
        self._keep = keep
        self._bench = bench
        self._trajectory = trajectory
        self._survey = Survey(bench, trajectory, scouted, room)
        self._room = room
        self.k = trajectory.k
        self.first: Surrogate | None = None
        self._simple: dict[Name, Tensor] = {}  # true outputs [O]

    def begin(self, K: int) -> Surrogate:
        """The cache around the scouted base; outputs of simple averages, where they can be had."""
        wanted: dict[Name, Coefficients] = {}
        room, extra = self._room, 2
        if K == AUTO and not self._keep:
            wanted = simple_averages(self.k)
            extra += len(wanted)
            vectors = len(wanted) * 4 * self._trajectory.layout.size
            if vectors > room // 4:
                wanted = {}  # too much to sum up at once: their outputs are predicted
            else:
                room -= vectors
        elif isinstance(self._trajectory, Remembered):
            wanted = {("lawa", K): simple_average("lawa", K, self.k)}
        here, sums = self._survey.begin(wanted, room, extra)
        self.first = here
        if K == AUTO:
            self._simple = {key: self._survey.outputs(here, flat) for key, flat in sums.items()}
        elif isinstance(self._trajectory, Remembered):
            for key, flat in sums.items():
                self._trajectory.remember(wanted[key], flat)
        return here

    def choose(self, K: int) -> Chosen:
        """K of the checkpoints, or as many as cross-validation finds best."""
        if self.first is None:
            self.begin(K)
        if K != AUTO:
            return self._search(K, None if self._keep else self._labels(self._here()))
        budget = self._find_budget(self._here())
        if budget.labels != "matter":
            self._bench.warn(NOISE if budget.labels == "noise" else UNSEEN)
        option = budget.options[budget.chosen]
        cache = cache_of(self._here())
        if option.name == LEARNED:
            assert option.K is not None
            chosen = self._search(option.K, budget.labels)
            simple = min((o for o in budget.options if o.name != LEARNED), key=lambda o: o.loss)
            if chosen.loss is None or chosen.loss < simple.loss:
                return replace(chosen, budget=budget)
            # what was predicted has not come true
            option = simple
            budget = replace(budget, chosen=budget.options.index(simple))
            self._bench.warn(
                f"the learned average's true selection loss is {chosen.loss:.5g}, no better than "
                f"the {simple.name} average's {simple.loss:.5g}, which is taken"
            )
        if self._bench.config.stable:
            self._bench.warn(f"--stable: `{option.name}` is taken, which learns nothing")
        coefficients = simple_average(option.name, option.K, self.k)
        return Chosen(
            coefficients,
            option.name,
            sum(c != 0 for c in coefficients),
            cache=cache,
            budget=budget,
            labels=budget.labels,
        )

    def _here(self) -> Surrogate:
        assert self.first is not None
        return self.first

    def _search(self, K: int, labels: Labels | None) -> Chosen:
        """Round by round; what has the lowest true loss is kept."""
        here = self._here()
        if not self._keep:
            self.first, self._simple = None, {}  # one cache at a time
        settings = self._bench.config.linear
        starts = [_members(name, K, self.k) for name in ("lawa", "latest")]
        found = self._solve(here, K, starts)
        base_loss, base = self._survey.scouted.loss, _name_of(self._survey.scouted.members, self.k)
        rounds: list[Round] = []
        best: tuple[float, Solution] | None = None
        for _ in range(settings.rounds - 1):
            predicted = predicted_loss(here, found.selected)
            flat = self._survey.mix(mean_of(found.selected, self.k))
            del here
            here = self._survey.around(flat)
            whole = here.size.rows == here.size.of_rows
            loss = here.loss(here.base) if whole else self._survey.loss_of(flat)
            rounds.append(Round(base=base, base_loss=base_loss, predicted=predicted, loss=loss))
            if best is None or loss < best[0]:
                best = (loss, found)
            base, base_loss = "the average found", loss
            found = self._solve(here, K, [found.selected])
        predicted = predicted_loss(here, found.selected)
        loss = self._survey.loss_of_mean(found.selected)
        rounds.append(Round(base=base, base_loss=base_loss, predicted=predicted, loss=loss))
        if best is not None and best[0] < loss:
            loss, found = best
        selected = found.selected
        selected, loss, tried = self._swap_exactly(here, selected, loss, settings.exact_swaps)
        relaxed = torch.tensor(found.probabilities, dtype=torch.float64)
        stability = None
        if settings.bootstrap > 0 and not self._keep:
            stability = self._stability(here, K, relaxed, self._survey.error(here, selected, loss))
        if self._bench.config.stable:
            if stability is None:
                raise ConfigError(
                    "--stable: the selection rows cannot be resampled: they are too few, the loss "
                    "does not split into rows, or linear.bootstrap is 0"
                )
            selected = most_frequent(stability, relaxed, K)
            loss = self._survey.loss_of_mean(selected)
        error = self._survey.error(here, selected, loss)
        self._warn_of_error(error, loss)
        return Chosen(
            coefficients=mean_of(selected, self.k),
            name=LEARNED,
            K=K,
            loss=predicted_loss(here, selected) - error,
            solution=Solution(found.probabilities, selected, found.history),
            rounds=rounds,
            cache=cache_of(here),
            surrogate_error=error,
            swaps_tried=tried,
            stability=stability,
            labels=labels,
        )

    def _warn_of_error(self, error: float, loss: float) -> None:
        """A prediction that is off by more than what was gained has chosen by luck."""
        gained = self._survey.scouted.uniform_loss - loss
        if not self._keep and abs(error) > max(abs(gained), SMALL * abs(loss)):
            self._bench.warn(
                f"the predicted loss of the choice is off by {error:.3g}, more than the "
                f"{gained:.3g} it gained over the mean of all: predictions are poor on this run; "
                "--solver gumbel may do better"
            )

    def _labels(self, here: Surrogate) -> Labels:
        simple = [
            self._survey.outputs(here, flat)
            for flat in (self._survey.scouted.uniform, self._survey.scouted.last)
        ]
        found = here.labels([here.base, *simple], self._bench.config.seed)
        if found != "matter":
            self._bench.warn(f"{NOISE}; choose by others" if found == "noise" else UNSEEN)
        return found

    def _solve(self, here: Surrogate, K: int, starts: Sequence[Sequence[int]]) -> Solution:
        settings = self._bench.config.linear

        def tell(iteration: int, loss: float) -> None:
            self._bench.listener.progress("learning", iteration + 1, settings.iterations, loss)

        try:
            return linear.solve(here, K, settings, starts, on_iteration=tell)
        except ValueError as error:
            raise TaskError(f"learning the mask failed: {error}") from error

    def _swap_exactly(
        self, here: Surrogate, selected: list[int], loss: float, tries: int
    ) -> tuple[list[int], float, int]:
        """Swaps that promise most by the surrogate, each judged with true weights."""
        tried, refused = 0, set[tuple[int, ...]]()
        if tries == 0:
            return selected, loss, 0
        flat = self._survey.mix(mean_of(selected, self.k)).clone()
        while tried < tries:
            promising = linear.swaps(here, selected, self._bench.config.linear.swaps or tries)
            swap = next(
                (
                    s
                    for s in sorted(promising, key=lambda swap: swap.loss)
                    if tuple(s.chosen) not in refused
                ),
                None,
            )
            if swap is None:
                break
            tried += 1
            change = [0.0] * self.k
            change[swap.gained], change[swap.lost] = 1 / len(selected), -1 / len(selected)
            moved = flat + self._survey.mix(change)
            after = self._survey.loss_of(moved)
            if after < loss:
                selected, loss, flat = swap.chosen, after, moved
            else:
                refused.add(tuple(swap.chosen))
        return selected, loss, tried

    # ---- what else one cache can tell ----------------------------------------------------------

    def _find_budget(self, here: Surrogate) -> Budget:
        config = self._bench.config
        simple = {
            key: self._simple[key] if key in self._simple else here.mix(_as_tensor(coefficients))
            for key, coefficients in simple_averages(self.k).items()
        }
        simple[("last", None)] = self._survey.outputs(here, self._survey.scouted.last)
        simple[("uniform", None)] = self._survey.outputs(here, self._survey.scouted.uniform)
        sizes = grid(self.k)

        def tell(fold: int) -> None:
            self._bench.listener.progress("folds", fold + 1, config.linear.folds)

        weights = {key: 1 / sum(c * c for c in simple_average(*key, self.k)) for key in simple}
        try:
            return choose_budget(here, sizes, simple, weights, config.linear, config.seed, tell)
        except ValueError as error:
            raise TaskError(f"the linear solver: {error}") from error

    def _stability(
        self, here: Surrogate, K: int, relaxed: Tensor, error: float
    ) -> Stability | None:
        config = self._bench.config
        simple = {
            "last": self._survey.outputs(here, self._survey.scouted.last),
            "uniform": self._survey.outputs(here, self._survey.scouted.uniform),
        }

        def tell(number: int) -> None:
            self._bench.listener.progress("resampling", number + 1, config.linear.bootstrap)

        try:
            return resample(here, K, config.linear, relaxed, simple, -error, config.seed, tell)
        except ValueError as error_:
            raise TaskError(f"resampling the selection rows failed: {error_}") from error_


def _members(name: str, K: int, k: int) -> list[int]:
    return [i for i, c in enumerate(simple_average(name, K, k)) if c != 0]


def _as_tensor(coefficients: Coefficients) -> Tensor:
    return torch.tensor(coefficients, dtype=torch.float64)


def _name_of(members: Sequence[int], k: int) -> str:
    if len(members) == k:
        return "the mean of all"
    return f"the mean of checkpoints {members[0]} to {members[-1]}"
