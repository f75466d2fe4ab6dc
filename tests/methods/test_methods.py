"""Every method: a hand-computed example, and the properties it promises."""

from __future__ import annotations

from math import sqrt

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sewa_cli import methods
from sewa_cli.methods import REGISTRY, Run, mean_of, parse_one
from sewa_cli.settings import AUTO

ALL = sorted(name for name, method in REGISTRY.items() if not method.needs_metric)
EXACTLY_K = ["lawa", "latest", "random", "sewa", "topk", "wsm"]


def quadratic(points, target, steps=None):
    """A run of scalars: L(c) = (Σ c_i x_i − target)²."""
    x = torch.tensor(points, dtype=torch.float64)

    def loss(c):
        return float((torch.tensor(c, dtype=torch.float64) @ x - target) ** 2)

    def gradient(c):
        error = float(torch.tensor(c, dtype=torch.float64) @ x) - target
        return error**2, (2 * error * x).tolist()

    def learn(K):
        if K == AUTO:  # weights on all: the nearer the target, the more
            near = (1 / (1 + (x - target).abs())).tolist()
            return [weight / sum(near) for weight in near]
        order = sorted(range(len(points)), key=lambda i: abs(points[i] - target))[:K]
        return mean_of(order, len(points))

    return Run(len(points), steps, 0, loss, gradient, learn)


def one(spec, run, K=None):
    return parse_one(spec)(run, K)[0]


RUN = quadratic([0.0, 4.0, 1.0, 3.0], target=2.0)


@pytest.mark.parametrize(
    ("spec", "K", "expected"),
    [
        ("last", None, [0, 0, 0, 1]),
        ("uniform", None, [0.25] * 4),
        ("lawa", 2, [0, 0.5, 0, 0.5]),
        ("latest", 3, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("swa", None, [0, 0, 0, 1]),
        ("swa:start=0.25", None, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("swa:start=0:every=3", None, [0.5, 0, 0, 0.5]),
        ("ema", None, [0.729, 0.081, 0.09, 0.1]),
        ("ema:decay=0.5", None, [0.125, 0.125, 0.25, 0.5]),
        ("ema:decay=0", None, [0, 0, 0, 1]),
        ("ema-window", 3, [0.125, 0.125, 0.25, 0.5]),
        ("power:gamma=0", None, [0.25] * 4),
        ("power:gamma=1", None, [0.1, 0.2, 0.3, 0.4]),
        ("power", None, [0.01, 0.08, 0.27, 0.64]),
        ("wsm:decay=linear", 2, [0, 0, 0.5, 0.5]),
        ("wsm", 2, [0, 0, sqrt(0.5), 1 - sqrt(0.5)]),
        ("wsm", 1, [0, 0, 0, 1]),
        # single losses: 4, 4, 1, 1, so by loss: 3, 2, 1, 0
        ("best", None, [0, 0, 0, 1]),
        ("topk", 3, [0, 1 / 3, 1 / 3, 1 / 3]),
        # 3 alone: 1; with 2: 0; with 1 or 0: worse
        ("greedy", None, [0, 0, 0.5, 0.5]),
        ("forward", 3, [0, 0, 0.5, 0.5]),
        ("forward", 1, [0, 0, 0, 1]),
        ("sewa", 2, [0, 0, 0.5, 0.5]),
        # at distances 2, 2, 1, 1 from the target
        ("aggregate", None, [0.2, 0.2, 0.3, 0.3]),
    ],
)
def test_coefficients_by_hand(spec, K, expected):
    assert one(spec, RUN, K) == pytest.approx(expected)


def test_swa_goes_by_step_where_steps_are_known():
    run = quadratic([0.0] * 5, 0.0, steps=[100, 900, 1000, 1190, 1200])
    assert one("swa", run) == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_an_ema_of_window_k_is_as_old_on_average_as_the_mean_of_the_last_k():
    run = Run(4000)
    for K in (1, 3, 10, 50):
        ages = [run.k - 1 - i for i in range(run.k)]
        ema = sum(a * c for a, c in zip(ages, one("ema-window", run, K), strict=True))
        mean = sum(a * c for a, c in zip(ages, one("latest", run, K), strict=True))
        assert ema == pytest.approx(mean, abs=1e-6)


def test_wsm_weights_updates_as_the_decay_it_names():
    K, run = 8, Run(8)
    weights = one("wsm", run, K)
    # the factor on the j-th update is the sum of the weights from j on
    factors = [sum(weights[j:]) for j in range(1, K)]
    assert factors == pytest.approx([1 - sqrt(j / K) for j in range(1, K)])


def test_twa_finds_the_minimum_inside_the_simplex():
    c = one("twa:iterations=400:lr=0.3", RUN)
    assert RUN.loss(c) < 1e-3
    assert all(x > 0 for x in c)


points = st.lists(st.floats(-5, 5), min_size=3, max_size=15)


@settings(max_examples=30)
@given(points, st.floats(-3, 3), st.data())
def test_coefficients_sum_to_one_are_not_negative_and_use_k_where_promised(values, target, data):
    K = data.draw(st.integers(1, len(values) - 1))
    run = quadratic(values, target)
    for name in ALL:
        for c in parse_one(name)(run, K):
            assert len(c) == len(values)
            assert sum(c) == pytest.approx(1)
            assert min(c) >= 0
            if name in EXACTLY_K:
                assert sum(x > 0 for x in c) == K
            if name == "forward":
                assert sum(x > 0 for x in c) <= K


@given(st.integers(1, 300), st.data())
def test_equal_intervals_differ_by_one_at_most_and_end_at_the_newest(k, data):
    K = data.draw(st.integers(1, k))
    chosen = [i for i, c in enumerate(one("lawa", Run(k), K)) if c > 0]
    assert len(chosen) == K
    assert chosen[-1] == k - 1
    gaps = [b - a for a, b in zip([-1, *chosen], chosen, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_random_draws_differ_and_come_back_with_the_seed():
    first, again = (parse_one("random:draws=6")(Run(30, seed=3), 5) for _ in range(2))
    assert first == again
    assert len({tuple(draw) for draw in first}) == 6
    assert parse_one("random")(Run(30, seed=4), 5)[0] != first[0]


def test_greedy_and_forward_never_end_above_the_best_single():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        run = quadratic(torch.randn(9, generator=generator).tolist(), 0.4)
        best = run.loss(one("best", run))
        assert run.loss(one("greedy", run)) <= best
        assert run.loss(one("forward", run, 5)) <= best


def test_a_checkpoint_whose_loss_is_nan_is_never_chosen_by_loss():
    run = quadratic([0.0, 1.0, 5.0], 1.0)

    def loss(c):
        return float("nan") if c[2] > 0 else run.loss(c)

    broken = Run(3, loss=loss)
    for name in ("best", "greedy", "forward", "topk"):
        assert one(name, broken, 2)[2] == 0


@pytest.mark.parametrize(
    ("spec", "K"),
    [
        ("swa:start=1.5", None),
        ("swa:every=0", None),
        ("ema:decay=1", None),
        ("power:gamma=-1", None),
        ("power:gamma=1001", None),
        ("power:gamma=nan", None),
        ("wsm:decay=cosine", 2),
        ("lawa", 5),
        ("latest", 0),
        ("random", 9),
        ("random:draws=0", 2),
    ],
)
def test_an_option_out_of_range_is_told(spec, K):
    with pytest.raises(ValueError, match=r"must|cannot"):
        parse_one(spec)(RUN, K)


@pytest.mark.usefixtures("own_registry")
def test_an_own_method_is_registered_with_its_options_and_checked():
    @methods.method()
    def first_and_last(run: Run, *, share: float = 0.5) -> list[float]:
        """The two ends."""
        return [share, *[0.0] * (run.k - 2), 1 - share]

    assert one("first-and-last:share=0.25", Run(4)) == [0.25, 0, 0, 0.75]

    @methods.method("wrong")
    def too_short(run: Run) -> list[float]:
        return [1.0] * (run.k - 1)

    with pytest.raises(ValueError, match="wrong gave 3 coefficients for 4 checkpoints"):
        one("wrong", Run(4))

    @methods.method("heavy")
    def heavy(run: Run) -> list[float]:
        return [1.0] * run.k

    with pytest.raises(ValueError, match="sum to 4 instead of 1"):
        one("heavy", Run(4))
    with pytest.raises(ValueError, match="already"):
        methods.method("lawa")(heavy)
