"""Outputs of averages predicted in output space: exact where the model is linear in its weights."""

from __future__ import annotations

from collections import UserDict
from copy import copy
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from helpers.problems import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.solvers import mask
from sewa_cli.solvers.linear import relax as linear
from sewa_cli.solvers.linear.build import build
from sewa_cli.solvers.linear.surrogate import Surrogate, mean
from sewa_cli.solvers.linear.survey import QUARTERS, scout
from sewa_cli.solvers.linear.units import Units
from sewa_cli.solvers.linear.whole import Whole
from sewa_cli.trajectory.dense import Dense

CPU = torch.device("cpu")
ROOM = 10**9


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


class Problem:
    """k random checkpoints of a model, and batches."""

    def __init__(
        self,
        k: int = 9,
        seed: int = 0,
        model: nn.Module | None = None,
        loss: Any = None,
        predict: Any = None,
        batches: Any = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = FlatModel(model or nn.Linear(4, 3), CPU)
        self.loss = loss or (lambda outputs, batch: F.cross_entropy(outputs, batch[1]))
        predict = predict or (lambda model, batch: model(batch[0]))
        self.k = k
        self.W = torch.randn(k, self.model.layout.size, generator=generator)
        self.batches = batches or [
            (
                torch.randn(n, 4, generator=generator),
                torch.randint(3, (n,), generator=generator),
            )
            for n in (7, 4)
        ]
        self.objective = Objective(self.model, predict, self.loss, backward, self.batches)

    def surrogate(self, h: float = 0.1, room: int = ROOM) -> Surrogate:
        trajectory = Dense(self.W, self.model.layout)
        problem = replace(problem_of(self.objective, trajectory), room=room)
        return build(problem, self.W.mean(0), h)

    def true_loss(self, c: Tensor) -> float:
        self.model.set(c.float() @ self.W)
        return self.objective.mean_loss(self.batches)[0]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(2, 12),
    h=st.floats(0.05, 1.0),
    squared=st.booleans(),
)
def test_on_a_model_that_is_linear_in_its_weights_the_prediction_is_the_truth(
    seed: int, k: int, h: float, squared: bool
) -> None:
    loss = (lambda outputs, batch: ((outputs - batch[0][:, :3]) ** 2).mean()) if squared else None
    problem = Problem(k, seed, loss=loss)
    surrogate = problem.surrogate(h)
    c = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    c /= c.sum()
    predicted = surrogate.loss(surrogate.mix(c))
    assert predicted == pytest.approx(problem.true_loss(c), rel=2e-5 / h, abs=1e-6)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    counts=st.lists(st.integers(2, 6), min_size=2, max_size=8),
    width=st.integers(0, 2),
    room=st.sampled_from([0, 200, ROOM]),
)
def test_small_batches_joined_for_the_loss_give_the_same_losses_gradients_and_samples(
    seed: int, counts: list[int], width: int, room: int
) -> None:
    """With other columns of the batch of one width or of several, and room for copies or none."""
    generator = torch.Generator().manual_seed(seed)
    batches = [
        {
            "x": torch.randn(n, 4, generator=generator),
            "y": torch.randint(3, (n,), generator=generator),
            "other": torch.zeros(n, 1 + i * width // 3),
            "scale": torch.tensor(2.0),
        }
        for i, n in enumerate(counts)
    ]
    calls = []

    def loss(outputs: Tensor, batch: Any) -> Any:
        calls.append(len(outputs))
        return batch["scale"] * F.cross_entropy(outputs, batch["y"])

    problem = Problem(5, seed, loss=loss, predict=lambda m, b: m(b["x"]), batches=batches)
    joined = problem.surrogate()
    apart = copy(joined)
    apart.outputs.take_apart()
    joined.outputs = copy(apart.outputs)
    assert isinstance(joined.outputs, Whole)
    joined.outputs.join(joined.base, room)
    if room == ROOM and width == 0:
        assert joined.outputs.counts == [sum(counts)]
    if room == 0:
        assert joined.outputs.counts == counts
    assert sum(joined.outputs.counts) == sum(counts)
    c = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    c /= c.sum(1, keepdim=True)
    times = torch.randint(3, (sum(counts),), generator=generator)
    times[0] = 1
    shares = torch.rand(3, sum(counts), generator=generator)
    for one, other in (
        (apart.outputs.unit_losses(apart.base), joined.outputs.unit_losses(joined.base)),
        (apart.loss_and_gradient(c[0])[1], joined.loss_and_gradient(c[0])[1]),
        (
            apart.gradients(c, apart.outputs.factors(shares, by_row=True)),
            joined.gradients(c, joined.outputs.factors(shares, by_row=True)),
        ),
        (apart.on(times).loss_and_gradient(c[0])[1], joined.on(times).loss_and_gradient(c[0])[1]),
    ):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    calls.clear()
    assert joined.loss(joined.base) == pytest.approx(apart.loss(apart.base), rel=1e-6)
    assert len(calls) == len(joined.outputs.counts) + len(counts)
    assert torch.equal(
        joined.outputs.true_outputs(), apart.outputs.true_outputs()
    )  # run as the user made them


def test_batches_are_joined_only_where_the_loss_splits_and_what_they_share_is_the_same() -> None:
    def centred(outputs: Tensor, batch: Any) -> Any:
        return ((outputs - outputs.mean(0)) ** 2).mean() + 0 * batch[1].sum()

    assert Problem(loss=centred).surrogate().outputs.counts == [7, 4]
    assert Problem().surrogate().outputs.counts == [11]
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    batches = [(x, y, torch.tensor(scale)) for scale in (1.0, 2.0)]
    problem = Problem(
        loss=lambda outputs, batch: batch[2] * F.cross_entropy(outputs, batch[1]), batches=batches
    )
    assert problem.surrogate().outputs.counts == [4, 4]


class Kind(NamedTuple):
    x: Tensor
    y: Tensor


class OtherKind(NamedTuple):
    x: Tensor
    y: Tensor


class Scaled(UserDict[str, Tensor]):
    scale = 1.0


def scaled(x: Tensor, y: Tensor, scale: float) -> Scaled:
    found = Scaled(x=x, y=y)
    found.scale = scale
    return found


def few_only(outputs: Tensor, batch: Any) -> Tensor:
    assert len(outputs) <= 6, "never saw so many"
    return F.cross_entropy(outputs, batch[1])


def by_list(outputs: Tensor, batch: Any) -> Tensor:
    return (F.cross_entropy(outputs, batch[1], reduction="none") * torch.tensor(batch[2])).mean()


ODD: dict[str, tuple[Any, Any]] = {  # a batch of rows x, y and its number; the loss
    "the task's name is the key": (
        lambda x, y, i: {("easy", "hard")[i % 2]: (x, y)},
        lambda outputs, batch: (
            (10.0 if "hard" in batch else 1.0)
            * F.cross_entropy(outputs, next(iter(batch.values()))[1])
        ),
    ),
    "the kind of tuple counts": (
        lambda x, y, i: (Kind, OtherKind)[i % 2](x, y),
        lambda outputs, batch: (
            (2.0 if isinstance(batch, Kind) else 1.0) * F.cross_entropy(outputs, batch.y)
        ),
    ),
    "columns in another order": (
        lambda x, y, i: dict(
            [("x", x), *[("y", y), ("z", 2 - y)][:: (1, -1)[i % 2]]],
        ),
        lambda outputs, batch: F.cross_entropy(outputs, batch["y"]),
    ),
    "an attribute of the batch": (
        lambda x, y, i: scaled(x, y, 1.0 + i % 2),
        lambda outputs, batch: batch.scale * F.cross_entropy(outputs, batch["y"]),
    ),
    "a loss that takes few rows only": (lambda x, y, _: (x, y), few_only),
    "weights as a list": (lambda x, y, _: (x, y, [1.0] * len(y)), by_list),
    "a shared tensor in batches of one row": (
        lambda x, y, _: (x, y, torch.ones(1)),
        lambda outputs, batch: batch[2].sum() * F.cross_entropy(outputs, batch[1]),
    ),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ODD)
def test_a_loss_that_would_see_another_batch_is_called_on_the_users_own(
    name: str, size: int
) -> None:
    make, loss = ODD[name]
    torch.manual_seed(0)
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    pieces = zip(torch.split(x, size), torch.split(y, size), strict=True)

    def predict(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, dict | UserDict):
            first = batch["x"] if "x" in batch else next(iter(batch.values()))[0]
            return model(first)
        return model(batch[0])

    batches = [make(x, y, i) for i, (x, y) in enumerate(pieces)]
    surrogate = Problem(loss=loss, predict=predict, batches=batches).surrogate()
    apart = copy(surrogate)
    apart.outputs = copy(surrogate.outputs)
    apart.outputs.take_apart()
    assert sum(surrogate.outputs.counts) == sum(apart.outputs.counts) == 24
    assert surrogate.loss(surrogate.base) == pytest.approx(apart.loss(apart.base), rel=1e-6)
    found, expected = (
        surrogate.outputs.unit_losses(surrogate.base),
        apart.outputs.unit_losses(apart.base),
    )
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_no_more_rows_are_joined_than_a_loss_that_compares_each_with_each_can_bear() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(900, 4), torch.randint(3, (900,))
    pieces = zip(torch.split(x, 9), torch.split(y, 9), strict=True)
    counts = Problem(batches=list(pieces)).surrogate().outputs.counts
    assert sum(counts) == 900
    assert max(counts) == 252
    assert len(counts) == 4


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), k=st.integers(3, 12), data=st.data())
def test_no_subset_of_up_to_twelve_checkpoints_is_better_than_the_chosen_one(
    seed: int, k: int, data: st.DataObject
) -> None:
    K = data.draw(st.integers(1, k - 1))
    problem = Problem(k, seed)
    surrogate = problem.surrogate()
    chosen = linear.solve(surrogate, K).selected
    best = min(problem.true_loss(mean(s, k)) for s in combinations(range(k), K))
    assert len(chosen) == K
    assert problem.true_loss(mean(chosen, k)) == pytest.approx(best, rel=1e-4)


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), k=st.integers(13, 30), K=st.integers(1, 12))
def test_with_many_subsets_no_single_swap_improves_the_answer_and_the_relaxed_loss_bounds_it(
    seed: int, k: int, K: int
) -> None:
    problem = Problem(k, seed)
    surrogate = problem.surrogate()
    solution = linear.solve(surrogate, K, iterations=300, swaps=k * k)

    loss = surrogate.loss_of_mean
    found = loss(solution.selected)
    assert solution.history[-1] <= found * (1 + 1e-3)  # the relaxed problem allows more
    assert solution.history == sorted(solution.history, reverse=True)
    for lost in solution.selected:
        for gained in set(range(k)) - set(solution.selected):
            rest = [i for i in solution.selected if i != lost]
            assert loss([*rest, gained]) >= found * (1 - 1e-4)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 19), p=st.integers(1, 5))
def test_problems_side_by_side_end_where_each_would_alone(seed: int, K: int, p: int) -> None:
    surrogate = Problem(20, seed).surrogate()
    units = Units(surrogate.outputs, surrogate.base)
    generator = torch.Generator().manual_seed(seed)
    n = len(units)
    times = torch.stack(
        [torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n) for _ in range(p)]
    )
    start = torch.full((20,), K / 20, dtype=torch.float64)
    gradient = units.gradient_on(surrogate, times, 2**30)
    together = linear.relax_together(gradient, K, start.expand(p, -1), 100)
    for drawn, s in zip(times, together, strict=True):
        assert float(s.sum()) == pytest.approx(K)
        assert float(s.min()) >= 0
        assert float(s.max()) <= 1
        on = surrogate.on(drawn)
        _, history = linear.relax(on, K, start, 200)
        gained = history[0] - history[-1]
        assert on.loss(on.mix(s / K)) <= history[-1] + 0.02 * gained + 1e-6


def test_a_problem_without_a_finite_gradient_stays_where_it_is_and_the_others_go_on() -> None:
    target = torch.tensor([0.1, 0.9, 0.6, 0.4], dtype=torch.float64)

    def gradient(C: Tensor) -> Tensor:
        found = C - target / 2
        found[0] = torch.nan
        return found

    start = torch.full((2, 4), 0.5, dtype=torch.float64)
    found = linear.relax_together(gradient, 2, start, 50)
    assert torch.equal(found[0], start[0])
    assert torch.allclose(found[1], target)


@settings(max_examples=50)
@given(
    v=st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    share=st.floats(0, 1),
    round_=st.booleans(),
)
def test_the_projection_lands_in_the_set_and_nothing_in_it_is_nearer(
    v: list[float], share: float, round_: bool
) -> None:
    point = torch.tensor(v, dtype=torch.float64)
    if round_:
        point = point.round()  # ties
    total = share * len(v)
    s = mask.project_to_sum(point, total)
    assert float(s.sum()) == pytest.approx(total, abs=1e-9)
    assert bool(((s >= 0) & (s <= 1)).all())
    # the slow twin: shifted by bisection until the sum is right
    low, high = float(point.min()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        if float((point - middle).clamp(0, 1).sum()) > total:
            low = middle
        else:
            high = middle
    twin = (point - high).clamp(0, 1)
    assert float(((point - s) ** 2).sum()) <= float(((point - twin) ** 2).sum()) + 1e-6


def test_the_gradient_is_that_of_the_loss() -> None:
    problem = Problem()
    surrogate = problem.surrogate()
    c = torch.full((problem.k,), 1 / problem.k, dtype=torch.float64)
    _, gradient = surrogate.loss_and_gradient(c)
    for i in range(problem.k):
        step = torch.zeros_like(c)
        step[i] = 1e-2
        up, down = (surrogate.loss(surrogate.mix(c + s * step)) for s in (1, -1))
        # up to one constant: outputs are predicted for weights that sum to one
        slope = (up - down) / 2e-2
        assert slope == pytest.approx(float(gradient[i]), rel=2e-2, abs=2e-3)


class Two(NamedTuple):
    logits: Tensor
    extra: dict[str, Tensor]


def test_outputs_may_be_a_nest_with_whole_numbers_and_infinities_in_it() -> None:
    banned = torch.tensor([0.0, 0.0, -torch.inf])

    def predict(model: nn.Module, batch: Any) -> Two:
        out = model(batch[0])
        return Two(out + banned, {"half": out.half(), "index": batch[1]})

    def loss(outputs: Two, batch: Any) -> Tensor:
        assert outputs.extra["half"].dtype == torch.float16
        assert torch.equal(outputs.extra["index"], batch[1])
        return (
            F.cross_entropy(outputs.logits, batch[1]) + outputs.extra["half"].float().pow(2).mean()
        )

    batches = [
        (torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1] * 3))
    ]
    problem = Problem(predict=predict, loss=loss, batches=batches)
    surrogate = problem.surrogate(h=0.5)
    c = mean([0, 3], problem.k)
    assert surrogate.loss(surrogate.mix(c)) == pytest.approx(problem.true_loss(c), rel=2e-3)
    value, gradient = surrogate.loss_and_gradient(c)
    assert bool(torch.isfinite(gradient).all())
    assert value == pytest.approx(problem.true_loss(c), rel=2e-3)


def test_a_loss_that_works_in_place_on_its_outputs_is_no_trouble() -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.mul_(2.0), batch[1])

    problem = Problem(loss=loss)
    surrogate = problem.surrogate()
    c = mean([1, 2], problem.k)
    once = surrogate.loss(surrogate.mix(c))
    assert surrogate.loss_and_gradient(c)[0] == pytest.approx(once, rel=1e-6)
    assert surrogate.loss(surrogate.mix(c)) == once


def test_float_buffers_move_along() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("shift", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.shift  # type: ignore[no-any-return]

    problem = Problem(model=Shifted())
    surrogate = problem.surrogate()
    c = mean([0, 5], problem.k)
    assert surrogate.loss(surrogate.mix(c)) == pytest.approx(problem.true_loss(c), rel=1e-3)


def test_a_smaller_room_makes_the_cache_bfloat16_and_a_smaller_one_takes_fewer_rows() -> None:
    big = [(torch.randn(200, 4), torch.randint(3, (200,))) for _ in range(2)]
    problem = Problem(k=40, batches=big)
    wide = problem.surrogate()
    assert (wide.size.dtype, wide.size.rows) == ("float32", 400)
    narrow = problem.surrogate(room=wide.size.bytes - 1)
    assert (narrow.size.dtype, narrow.size.rows) == ("bfloat16", 400)
    c = mean([3, 4, 7], 40)
    assert narrow.loss(narrow.mix(c)) == pytest.approx(wide.loss(wide.mix(c)), rel=0.02)
    few = problem.surrogate(room=narrow.size.bytes // 4)
    assert few.size.dtype == "bfloat16"
    assert 50 < few.size.rows <= 100
    assert few.size.bytes <= narrow.size.bytes // 4
    assert few.size.of_rows == 400
    with pytest.raises(ConfigError, match="raise --memory"):
        problem.surrogate(room=10)


def test_rows_make_samples_whose_losses_add_up() -> None:
    problem = Problem()
    surrogate = problem.surrogate()
    assert surrogate.outputs.splits(surrogate.base)
    outputs = surrogate.mix(mean([0, 1], problem.k))
    each = surrogate.outputs.unit_losses(outputs)
    assert each is not None
    assert float(each.mean()) == pytest.approx(surrogate.loss(outputs), rel=1e-5)
    times = torch.tensor([2, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0])  # of batches of 7 and 4
    expected = float((2 * each[0] + each[3] + each[7 + 2]) / 4)
    assert surrogate.on(times).loss(outputs) == pytest.approx(expected, rel=1e-5)


def test_whatever_the_padding_a_larger_room_is_never_too_small() -> None:
    lengths = torch.tensor([2, 20] * 200)
    x = torch.randn(400, 20, 4, generator=torch.Generator().manual_seed(0))
    batches = [(x[i : i + 10], lengths[i : i + 10]) for i in range(0, 400, 10)]

    def predict(model: nn.Module, batch: Any) -> Tensor:  # padded to the longest row of the batch
        return model(batch[0])[:, : int(batch[1].max())]  # type: ignore[no-any-return]

    problem = Problem(
        k=12, batches=batches, predict=predict, loss=lambda outputs, _: outputs.pow(2).mean()
    )
    whole = problem.surrogate().size
    rows = []
    for room in range(whole.bytes // 8, whole.bytes, whole.bytes // 8):
        size = problem.surrogate(room=room).size
        assert size.bytes <= room
        rows.append(size.rows)
    assert rows[-1] > rows[0]


@pytest.mark.parametrize("n", [4, 8, 40])
def test_labels_that_fit_are_never_taken_for_noise(n: int) -> None:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(3))
    problem = Problem(batches=[(x, torch.arange(n) % 2)])
    surrogate = problem.surrogate()
    perfect = 9 * F.one_hot(torch.arange(n) % 2, 3).float().reshape(-1)
    assert surrogate.outputs.labels([perfect]) == "matter"


def test_labels_that_were_shuffled_are_noise_and_a_loss_without_labels_sees_none() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(3))
    labels = torch.randint(3, (200,), generator=torch.Generator().manual_seed(4))
    found = [Problem(seed=s, batches=[(x, labels)]).surrogate() for s in range(8)]
    verdicts = [
        surrogate.outputs.labels([surrogate.base], seed) for seed, surrogate in enumerate(found)
    ]
    assert verdicts.count("noise") >= 6
    blind = Problem(loss=lambda outputs, _: outputs.pow(2).mean()).surrogate()
    assert blind.outputs.labels([blind.base]) == "unseen"


def test_shuffled_labels_of_copies_fit_by_luck_no_more_often_than_those_of_one() -> None:
    """Rows of a group, in several batches and as many as they may be, are mixed up together."""
    verdicts: dict[bool, list[str]] = {True: [], False: []}
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(20, 4, generator=generator)
        labels = torch.randint(3, (20,), generator=generator)
        group = torch.arange(20).repeat_interleave(torch.arange(20) % 4 + 6)
        group = group[torch.randperm(len(group), generator=generator)]
        columns = (part.split(16) for part in (x[group], labels[group], group))
        batches = list(zip(*columns, strict=True))
        for is_grouped, found in verdicts.items():
            problem = Problem(3, seed, batches=batches)
            problem.objective.label_groups = (lambda b: b[2].tolist()) if is_grouped else None
            outputs = problem.surrogate().outputs
            problem.model.set(problem.W[0])
            found.append(outputs.labels([outputs.true_outputs()], seed))
    assert verdicts[True].count("matter") == 0
    assert verdicts[False].count("matter") >= 2  # 13 of 60


def test_a_loss_over_the_whole_batch_does_not_split() -> None:
    problem = Problem(loss=lambda outputs, _: outputs.var(dim=0).sum())
    surrogate = problem.surrogate()
    assert not surrogate.outputs.splits(surrogate.base)
    assert surrogate.outputs.unit_losses(surrogate.base) is None
    whole = surrogate.outputs.batch_losses(surrogate.base)
    assert len(whole) == 2


def test_outputs_whose_size_depends_on_the_weights_are_refused() -> None:
    def predict(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch[0])
        return out[out.sum(1) > 0]

    problem = Problem(predict=predict, loss=lambda outputs, _: outputs.sum())
    with pytest.raises(TaskError, match="depends on the weights"):
        problem.surrogate(h=1.0)


def test_predictions_that_draw_random_numbers_draw_the_same_for_every_checkpoint() -> None:
    def predict(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]) + torch.randn(len(batch[0]), 3)  # type: ignore[no-any-return]

    problem = Problem(predict=predict)
    surrogate = problem.surrogate(h=0.05)
    plain = Problem().surrogate(h=0.05)
    assert torch.allclose(surrogate.difference(0, 1), plain.difference(0, 1), atol=1e-3)


def test_the_scout_takes_the_best_quarter_where_the_mean_of_all_is_bad() -> None:
    rows = [torch.full((3,), value) for value in (0.0, 0.0, 1.0, 1.0, 5.0, 5.0, 9.0, 9.0)]
    asked: list[float] = []

    def value(flat: Tensor) -> float:
        asked.append(float(flat[0]))
        return abs(float(flat[0]) - 1.1)

    found = scout(((i, row) for i, row in enumerate(rows)), len(rows), value)
    assert asked == [0.0, 1.0, 5.0, 9.0, 3.75]
    assert found.members == [2, 3]
    assert float(found.base[0]) == 1.0
    assert float(found.uniform[0]) == 3.75
    assert float(found.last[0]) == 9.0


@pytest.mark.parametrize("k", [2, 3, 5, 11])
def test_the_scout_evaluates_each_quarter_once_and_all_together(k: int) -> None:
    asked: list[Tensor] = []

    def value(flat: Tensor) -> float:
        asked.append(flat)
        return float("nan")

    rows = torch.randn(k, 4)
    found = scout(((i, row.clone()) for i, row in enumerate(rows)), k, value)
    assert len(asked) == len({i * QUARTERS // k for i in range(k)}) + 1
    assert torch.allclose(found.uniform, rows.mean(0), atol=1e-6)
    assert found.members == list(range(k))  # nothing is known to be better than the mean of all
