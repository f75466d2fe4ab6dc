"""Checkpoints stream past the model: their outputs go into a cache, sums of them on the way.

    scout     every checkpoint is read once: the mean of all, the newest, the best place to begin
    survey    every checkpoint is read once: its outputs go into the cache
    again     linearised at the average just found: it is read (K), then every checkpoint (k)

W is never held. In memory are a few vectors of the model's size and the cache. `choosing` decides
by what is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.methods import Coefficients, Run, mean_of, parse_one
from sewa_cli.session.session import Bench
from sewa_cli.solvers import linear as surrogate
from sewa_cli.solvers.crossvalidate import grid
from sewa_cli.solvers.linear import Scouted, Surrogate
from sewa_cli.solvers.linear import relax as linear
from sewa_cli.solvers.linear.streaming import judge_of
from sewa_cli.trajectory import Trajectory

Name = tuple[str, int | None]  # of a simple average, and its K


class Survey:
    """The true things: outputs of all checkpoints around a base, outputs and losses of averages."""

    def __init__(self, bench: Bench, trajectory: Trajectory, scouted: Scouted, room: int) -> None:
        self.scouted = scouted
        self.k = trajectory.k
        self._bench = bench
        self._trajectory = trajectory
        self._room = room
        self._judge = judge_of(bench)

    def begin(
        self, wanted: Mapping[Name, Coefficients], room: int, extra: int
    ) -> tuple[Surrogate, dict[Name, Tensor]]:
        """The cache around the scouted base; the averages wanted are summed up on the way."""
        sums: dict[Name, Tensor] = {}

        def rows() -> Iterator[tuple[int, Tensor]]:
            for i, row in self._trajectory.rows():
                for key, coefficients in wanted.items():
                    if coefficients[i] != 0:
                        total = sums.setdefault(key, torch.zeros_like(row))
                        total.add_(row, alpha=coefficients[i])
                yield i, row

        return self._build(self.scouted.base, rows, room, extra), sums

    def around(self, flat: Tensor) -> Surrogate:
        """The cache around weights [P]."""
        return self._build(flat, self._trajectory.rows, self._room, 2)

    def _build(
        self,
        base: Tensor,
        rows: Callable[[], Iterable[tuple[int, Tensor]]],
        room: int,
        extra: int,
    ) -> Surrogate:
        bench = self._bench

        def tell(i: int) -> None:
            bench.listener.progress("surveying", i + 1, self.k)

        try:
            found = surrogate.build(
                bench.objective,
                bench.task.selection_data,
                base,
                self.k,
                rows,
                bench.config.linear.h,
                room,
                bench.config.seed,
                tell,
                extra,
                bench.config.linear.outputs,
            )
        except surrogate.TooLittleRoom as error:
            raise ConfigError(f"memory: {error}") from error
        except ValueError as error:
            raise TaskError(f"the linear solver: {error}") from error
        if found.size.rows < found.size.of_rows and not any(
            "rows fit" in w for w in bench.warnings
        ):
            bench.warn(
                f"outputs of {found.size.rows} of the {found.size.of_rows} selection rows fit into "
                f"{'--memory' if found.size.bytes * 2 > room else 'linear.outputs'}; the choice is "
                "made on those"
            )
        return found

    def outputs(self, here: Surrogate, flat: Tensor) -> Tensor:
        """True ones, of weights [P]: a simple average may lie far from the base."""
        self._bench.model.set(flat)
        return here.true_outputs()

    def mix(self, coefficients: Coefficients) -> Tensor:
        """[P], from the files; valid until the next."""
        return self._trajectory.mix_few(coefficients)

    def loss_of(self, flat: Tensor) -> float:
        """The true selection loss of weights [P]."""
        return self._judge(flat)

    def loss_of_mean(self, selected: Sequence[int]) -> float:
        return self._judge(self.mix(mean_of(selected, self.k)))

    def error(self, here: Surrogate, selected: Sequence[int], loss: float) -> float:
        """Predicted minus true loss, both on the rows that the cache has."""
        if here.size.rows < here.size.of_rows:
            self._bench.model.set(self.mix(mean_of(selected, self.k)))
            loss = here.loss(here.true_outputs())
        return predicted_loss(here, selected) - loss


def predicted_loss(here: Surrogate, selected: Sequence[int]) -> float:
    return here.loss(here.mix(linear.mean(selected, here.k)))


def simple_averages(k: int) -> dict[Name, Coefficients]:
    """Those that learn nothing, besides the last one and the mean of all."""
    found: dict[Name, Coefficients] = {("ema", None): simple_average("ema", None, k)}
    for name in ("latest", "lawa"):
        found |= {(name, K): simple_average(name, K, k) for K in grid(k)[1:]}
    return found


def simple_average(name: str, K: int | None, k: int) -> Coefficients:
    return parse_one(name)(Run(k), K)[0]
