"""The bounds of docs/explanation/theory.md: the paper's, and each inequality on the page."""

import importlib
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
bounds = importlib.import_module("bounds")
sys.path.remove(str(BENCHMARKS))

probabilities = st.floats(0, 1)
products = st.floats(0.01, 100)
seeds = st.integers(0, 10_000)


@st.composite
def windows(draw):
    """A training run, and k of its iterates."""
    T = draw(st.integers(1, 10**6))
    alpha, lipschitz = draw(st.floats(1e-4, 10)), draw(st.floats(0.1, 10))
    run = bounds.Training(T, alpha, lipschitz, draw(st.integers(1, 10**6)))
    return run, draw(st.integers(0, T))


@given(windows(), probabilities)
def test_every_average_has_a_smaller_bound_than_the_last_iterate(window, s):
    run, k = window
    assert bounds.swa(run) == bounds.sgd(run) / 2
    assert bounds.swa(run) <= bounds.last_k(run, k) <= bounds.sgd(run)
    assert bounds.sewa(run, k, s) <= bounds.last_k(run, k) == bounds.sewa(run, k, 1.0)
    assert bounds.last_k(run, 0) == bounds.sgd(run)
    assert bounds.last_k(run, run.T) == bounds.swa(run)


def cross_entropy(logits, label):
    """logits [..., rows, classes], label [rows] → [..., rows]."""
    shifted = logits - logits.max(-1, keepdims=True)
    rows = np.arange(len(label))
    return np.asarray(np.log(np.exp(shifted).sum(-1)) - shifted[..., rows, label])


@given(seeds, st.integers(1, 6), st.integers(2, 5), st.floats(0.1, 10))
def test_a_mean_of_linear_models_is_at_least_as_good_as_they_are_in_the_mean(
    seed, J, classes, scale
):
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


def test_the_table_prints_and_the_picture_is_drawn(tmp_path, capsys):
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
