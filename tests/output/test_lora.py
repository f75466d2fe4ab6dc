"""Averages of products of thin factors, against the products themselves."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sewa_cli.output.lora import factor_gap, refactor

shapes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 6))


def factors(m, n, r, k, seed):
    generator = torch.Generator().manual_seed(seed)
    Bs = [torch.randn(m, r, generator=generator) for _ in range(k)]
    return Bs, [torch.randn(r, n, generator=generator) for _ in range(k)]


def naive(Bs, As, c):
    return sum((w * B.double() @ A.double() for w, B, A in zip(c, Bs, As)), torch.zeros(()))  # noqa: B905


def weights(k, seed):
    drawn = torch.rand(k, generator=torch.Generator().manual_seed(seed + 1)) + 0.1
    return [float(x) for x in drawn / drawn.sum()]


@settings(max_examples=60)
@given(shapes, st.integers(0, 2**31))
def test_refactor_is_the_truncated_svd_of_the_mean_of_products(shape, seed):
    m, n, r, k = shape
    Bs, As = factors(m, n, r, k, seed)
    c = weights(k, seed)
    B, A, error = refactor(Bs, As, c)
    assert B.shape == (m, r)
    assert A.shape == (r, n)
    target = naive(Bs, As, c)
    U, sigma, Vt = torch.linalg.svd(target, full_matrices=False)
    best = (U[:, :r] * sigma[:r]) @ Vt[:r]
    off = (B.double() @ A.double() - target).norm() / target.norm()
    expected = (best - target).norm() / target.norm()
    assert float(off) == pytest.approx(float(expected), abs=1e-5)
    assert error == pytest.approx(float(expected), abs=1e-5)


@settings(max_examples=60)
@given(shapes, st.integers(0, 2**31))
def test_the_gap_of_factors_apart_is_that_of_the_products(shape, seed):
    m, n, r, k = shape
    Bs, As = factors(m, n, r, k, seed)
    c = weights(k, seed)
    target = naive(Bs, As, c)
    mean_B = sum((w * B.double() for w, B in zip(c, Bs)), torch.zeros(()))  # noqa: B905
    mean_A = sum((w * A.double() for w, A in zip(c, As)), torch.zeros(()))  # noqa: B905
    expected = (mean_B @ mean_A - target).norm() / target.norm()
    # of nearly cancelling products only so many digits are left
    assert factor_gap(Bs, As, c) == pytest.approx(float(expected), rel=1e-3, abs=1e-4)


def test_factors_of_a_convolution_keep_their_shapes():
    generator = torch.Generator().manual_seed(0)
    As = [torch.randn(2, 3, 3, 3, generator=generator) for _ in range(2)]
    Bs = [torch.randn(5, 2, 1, 1, generator=generator) for _ in range(2)]
    B, A, _ = refactor(Bs, As, [0.5, 0.5])
    assert (B.shape, A.shape) == ((5, 2, 1, 1), (2, 3, 3, 3))
