"""Means against a float64 twin."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

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
