"""The bounds of docs/theory.md: the paper's, and each inequality that the page says is true."""

from __future__ import annotations

import importlib
import sys
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
bounds = importlib.import_module("bounds")
sys.path.remove(str(BENCHMARKS))

Array = NDArray[np.float64]
probabilities = st.floats(0, 1)
products = st.floats(0.01, 100)
seeds = st.integers(0, 10_000)


@st.composite
def windows(draw: st.DrawFn) -> tuple[Any, int]:
    """A training run, and k of its iterates."""
    T = draw(st.integers(1, 10**6))
    alpha, lipschitz = draw(st.floats(1e-4, 10)), draw(st.floats(0.1, 10))
    run = bounds.Training(T, alpha, lipschitz, draw(st.integers(1, 10**6)))
    return run, draw(st.integers(0, T))


@given(windows(), probabilities)
def test_every_average_has_a_smaller_bound_than_the_last_iterate(
    window: tuple[Any, int], s: float
) -> None:
    run, k = window
    assert bounds.swa(run) == bounds.sgd(run) / 2
    assert bounds.swa(run) <= bounds.last_k(run, k) <= bounds.sgd(run)
    assert bounds.sewa(run, k, s) <= bounds.last_k(run, k) == bounds.sewa(run, k, 1.0)
    assert bounds.last_k(run, 0) == bounds.sgd(run)
    assert bounds.last_k(run, run.T) == bounds.swa(run)


@given(products, st.integers(1, 10**4), st.integers(2, 10**6))
def test_exponents_fall_with_k_and_so_do_the_orders(x: float, k: int, T: int) -> None:
    assert bounds.exponent_last_k(x, k + 1) < bounds.exponent_last_k(x, k) < 1
    assert bounds.exponent_swa(x) < bounds.exponent_sgd(x) == x / (1 + x)
    run = bounds.Training(T)
    smaller, larger = bounds.exponent_last_k(x, k + 1), bounds.exponent_last_k(x, k)
    assert bounds.order(run, smaller) <= bounds.order(run, larger) <= T


@given(st.integers(1, 300), st.data())
def test_the_convex_bounds_are_about_the_mean_step_and_nothing_else(
    T: int, data: st.DataObject
) -> None:
    run, k = bounds.Training(T), data.draw(st.integers(1, T))
    newest = dict.fromkeys(range(T - k + 1, T + 1), 1 / k)
    assert bounds.average(run, {T: 1.0}) == bounds.sgd(run)
    assert bounds.average(run, newest) == pytest.approx(bounds.last_k(run, k) + 1)  # αL²/n
    with pytest.raises(ValueError, match="sum to one"):
        bounds.average(run, {T: 0.5})


def test_for_linear_losses_the_gap_is_the_mean_step_whatever_the_mask() -> None:
    """Rows z = ±1, loss z·w, all runs of SGD on all samples: so s does not scale a mean of K."""
    run, n = bounds.Training(T=3, n=2), 2
    gap = np.zeros(run.T)  # of each iterate
    for rows in product((-1.0, 1.0), repeat=n):
        for order in product(range(n), repeat=run.T):
            w = -np.cumsum([rows[i] for i in order])
            gap += (0 - np.mean(rows)) * w / 2**n / n**run.T  # true loss 0, less that on the rows
    assert gap == pytest.approx([1 / n, 2 / n, 3 / n])  # αL²t/n: half of the bound
    one_of_three = gap.mean()  # K = 1 at random of k = 3: s = 1/3
    assert one_of_three <= bounds.average(run, dict.fromkeys((1, 2, 3), 1 / 3))
    assert one_of_three > bounds.sewa(run, k=3, s=bounds.least_s(1, 3))


def cross_entropy(logits: Array, label: NDArray[np.int64]) -> Array:
    """logits [..., rows, classes], label [rows] → [..., rows]."""
    shifted = logits - logits.max(-1, keepdims=True)
    rows = np.arange(len(label))
    return np.asarray(np.log(np.exp(shifted).sum(-1)) - shifted[..., rows, label])


@given(seeds, st.integers(1, 6), st.integers(2, 5), st.floats(0.1, 10))
def test_a_mean_of_linear_models_is_at_least_as_good_as_they_are_in_the_mean(
    seed: int, J: int, classes: int, scale: float
) -> None:
    draw = np.random.default_rng(seed)
    x, label = draw.normal(size=(8, 3)), draw.integers(classes, size=8)
    candidates = scale * draw.normal(size=(J, 3, classes))
    shares = draw.dirichlet(np.ones(J))
    each = cross_entropy(x @ candidates, label)  # [J, rows]
    mixed = cross_entropy(x @ np.einsum("j,jdc->dc", shares, candidates), label)
    assert np.all(mixed <= shares @ each + 1e-9)
    # and exp-concave, with η of the least probability that a candidate gives to a label
    least = min(np.exp(-each.max()), 1 - 1e-9)
    eta = least / (1 - least)
    assert np.all(np.exp(-eta * mixed) >= shares @ np.exp(-eta * each) - 1e-9)


def shares_by(losses: Array, eta: float) -> Array:
    """∝ exp(−η·Σ losses), losses [J, rows]."""
    total = losses.sum(1)
    weights = np.exp(-eta * (total - total.min()))
    return np.asarray(weights / weights.sum())


@given(seeds, st.integers(2, 6), st.integers(1, 5), st.floats(0.01, 20))
def test_exponential_shares_keep_the_oracle_inequality(
    seed: int, J: int, n: int, eta: float
) -> None:
    """Over all samples of n rows out of three equally likely ones: no estimate, the expectation."""
    losses = np.random.default_rng(seed).uniform(size=(J, 3))
    true = losses.mean(1)
    samples = list(product(range(3), repeat=n))
    excess = np.mean([shares_by(losses[:, s], eta) @ true for s in samples]) - true.min()
    spread = np.ptp(losses - losses[true.argmin()], axis=1).max()  # of paired differences
    for B in (1.0, spread):
        assert excess <= log(J) / (eta * n) + eta * B**2 / 8 + 1e-12


@given(seeds, st.integers(2, 6), st.integers(0, 4))
def test_the_mean_over_prefixes_keeps_the_fast_one(seed: int, J: int, n: int) -> None:
    """Squared errors of at most 1 are exp-concave with η = 1/2."""
    draw = np.random.default_rng(seed)
    guesses, targets, eta = draw.uniform(size=(J, 3)), draw.uniform(size=3), 0.5
    losses = (guesses - targets) ** 2
    found = []
    for sample in product(range(3), repeat=n):
        prefixes = [shares_by(losses[:, list(sample[:i])], eta) for i in range(n + 1)]
        found.append(((np.mean(prefixes, axis=0) @ guesses - targets) ** 2).mean())
    assert np.mean(found) <= losses.mean(1).min() + log(J) / (eta * (n + 1)) + 1e-12


@given(st.floats(0.01, 20), st.integers(1, 10**6))
def test_with_a_constant_step_of_c_over_T_the_expansion_does_not_grow(x: float, T: int) -> None:
    assert (1 + x / T) ** T <= exp(x) * (1 + 1e-6)


def test_the_table_prints_and_the_picture_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "theory.png"
    bounds.main(["--steps", "500", "2000", "--plot", str(target)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| T | k | SWA | last k; SeWA, s=1 |")
    assert [line.split(" | ")[:2] for line in printed[2:]] == [
        ["| 500", "10"],
        ["| 500", "100"],
        ["| 2000", "10"],
        ["| 2000", "100"],
        ["| 2000", "1000"],
    ]
    assert "| 2000 | 1000 | 0.5 | 0.75 | 0.0075 | 0.075 |" in printed[-1]
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        (lambda run: bounds.last_k(run, 101), "k must be 0 to 100"),
        (lambda run: bounds.sewa(run, 10, 1.5), "s must be 0 to 1"),
        (lambda run: bounds.average(run, {101: 1.0}), "steps 1 to 100"),
        (lambda _: bounds.least_s(11, 10), "K must be 1 to 10"),
        (lambda _: bounds.exponent_last_k(1.0, 0), "k at least 1"),
    ],
)
def test_what_no_bound_is_stated_for_is_refused(wrong: Any, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        wrong(bounds.Training(100))
