"""Means against a float64 twin; blocks and threads against a mean of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sewa_cli import average
from sewa_cli.average import AHEAD, blocks, in_order, weighted_mean


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


def test_finite_numbers_whose_sum_overflows_are_fine() -> None:
    found = weighted_mean([torch.full((4,), 3e38)], [1.0])
    assert torch.equal(found, torch.full((4,), 3e38))


# ---- block by block, thread by thread ----------------------------------------------------------


def naive_mean(tensors: list[Tensor], coefficients: list[float]) -> Tensor:
    """Whole tensors, one after the other: what blocks and threads must not change by a bit."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if len(set(coefficients)) == 1:
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        return (total / (1 / coefficients[0])).to(tensors[0].dtype)
    total = coefficients[0] * tensors[0].to(wide)
    for tensor, c in zip(tensors[1:], coefficients[1:], strict=True):
        total = torch.add(total, tensor.to(wide), alpha=c)
    return total.to(tensors[0].dtype)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_bytes_are_the_naive_means_whatever_the_threads_and_blocks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, equal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(103, 97, generator=generator).to(dtype) for _ in range(7)]
    raw = torch.ones(7) if equal else torch.rand(7, generator=generator) + 0.01
    coefficients = (raw.double() / raw.double().sum()).tolist()
    expected = naive_mean(tensors, coefficients)
    for threads, block in [(1, 2**18), (1, 1000), (2, 1000), (3, 333), (2, 4096)]:
        torch.set_num_threads(threads)
        monkeypatch.setattr(average, "BLOCK", block)
        parts = zip(*(blocks(t) for t in tensors), strict=True)
        jobs = [partial(weighted_mean, part, coefficients) for part in parts]
        found = torch.cat(list(in_order(jobs))).reshape(103, 97)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (threads, block)
        assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("torch_threads")
def test_only_a_few_results_are_made_ahead_and_they_come_in_order() -> None:
    torch.set_num_threads(2)
    taken: list[int] = []

    def jobs() -> Iterator[partial[int]]:
        for i in range(50):
            assert i - len(taken) <= 2 * AHEAD + 1
            yield partial(int, i)

    for i in in_order(jobs()):
        taken.append(i)
    assert taken == list(range(50))


def test_a_job_that_fails_ends_the_others() -> None:
    def job(i: int) -> int:
        if i == 5:
            raise ValueError("five")
        return i

    with pytest.raises(ValueError, match="five"):
        list(in_order(partial(job, i) for i in range(1000)))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)], ids=str)
def test_every_tensor_has_at_least_one_block(shape: tuple[int, ...]) -> None:
    assert [b.numel() for b in blocks(torch.ones(shape))] == [torch.ones(shape).numel()]
