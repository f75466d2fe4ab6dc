"""Means against a float64 twin, and the simple ways to average against hand-made examples."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sewa_cli import methods
from sewa_cli.average import weighted_mean


@given(
    st.integers(1, 30),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_mean_equals_the_float64_mean_to_the_precision_it_is_kept_in(
    n: int, dtype: torch.dtype, equal: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(3, 5, generator=generator).to(dtype) for _ in range(n)]
    raw = torch.ones(n) if equal else torch.rand(n, generator=generator) + 0.01
    coefficients = (raw.double() / raw.double().sum()).tolist()
    expected = sum((c * t.double() for c, t in zip(coefficients, tensors, strict=True)))
    found = weighted_mean(tensors, coefficients)
    assert found.dtype == dtype
    step = torch.finfo(dtype).eps
    sums = n * (1e-15 if dtype == torch.float64 else 1.2e-7)  # the sum itself is float32 or better
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=sums * 4)


def test_bf16_checkpoints_are_not_summed_in_bf16() -> None:
    tensors = [torch.tensor([1.0 + i / 128], dtype=torch.bfloat16) for i in range(10)]
    naive = torch.stack(tensors).sum(0) / 10
    exact = torch.stack(tensors).double().mean()
    found = weighted_mean(tensors, [0.1] * 10, torch.float32)
    assert abs(found.double() - exact) < 1e-6 < abs(naive.double() - exact)


def test_the_inputs_are_not_changed() -> None:
    tensors = [torch.ones(3), torch.zeros(3)]
    weighted_mean(tensors, [0.5, 0.5])
    assert torch.equal(tensors[0], torch.ones(3))


def test_a_mean_that_overflows_the_wanted_dtype_is_an_error() -> None:
    with pytest.raises(ValueError, match="float16"):
        weighted_mean([torch.tensor([1e5])], [1.0], torch.float16)


def test_as_many_coefficients_as_tensors() -> None:
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([torch.ones(1)] * 3, [0.5, 0.3])


def test_simple_averages_by_hand() -> None:
    assert methods.last(3) == [0, 0, 1]
    assert methods.uniform(4) == [0.25] * 4
    assert methods.lawa(10, 2) == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0.5]
    assert methods.mean_of([2, 0], 3) == [0.5, 0, 0.5]


@given(st.integers(1, 300), st.data())
def test_equal_intervals_take_exactly_k_at_steps_that_differ_by_one_at_most(
    k: int, data: st.DataObject
) -> None:
    K = data.draw(st.integers(1, k))
    chosen = [i for i, c in enumerate(methods.lawa(k, K)) if c > 0]
    assert len(chosen) == K
    assert chosen[-1] == k - 1
    assert sum(methods.lawa(k, K)) == pytest.approx(1)
    gaps = [b - a for a, b in zip([-1, *chosen], chosen, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_what_cannot_be_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take 4 of 3"):
        methods.lawa(3, 4)
    with pytest.raises(ValueError, match="between 0 and 2"):
        methods.mean_of([3], 3)
