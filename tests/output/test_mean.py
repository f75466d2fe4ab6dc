"""Means against a float64 twin and a torch twin; pieces and threads against whole tensors."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given

from sewa_cli.dtypes import as_array, as_tensor
from sewa_cli.output import mean as average
from sewa_cli.output.mean import in_order, is_finite, pieces, weighted_mean

OUTPUTS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FLOATS = [*OUTPUTS, torch.float8_e4m3fn, torch.float8_e5m2]


def some_weights(n, equal, generator):
    raw = torch.ones(n) if equal else torch.rand(n, generator=generator) + 0.01
    return (raw.double() / raw.double().sum()).tolist()


def mean_of_tensors(tensors, weights, dtype=None):
    """What is tested, with torch on both sides."""
    arrays = [as_array(tensor).reshape(-1) for tensor in tensors]
    wanted = None if dtype is None else as_array(torch.empty(0, dtype=dtype)).dtype
    return as_tensor(weighted_mean(arrays, weights, wanted)).reshape(tensors[0].shape)


def naive_mean(tensors, weights, dtype=None):
    """Torch, whole tensors, one after the other: what must come out to the bit."""
    wide = torch.float64 if torch.float64 in (tensors[0].dtype, dtype) else torch.float32
    if len(set(weights)) == 1:
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        total = total / (1 / weights[0])
    else:
        scaled = [
            tensor.to(wide) * torch.tensor(c, dtype=wide)
            for tensor, c in zip(tensors, weights, strict=True)
        ]
        total = scaled[0]
        for tensor in scaled[1:]:
            total = total + tensor
    return total.to(dtype or tensors[0].dtype)


def raw(tensor):
    return as_array(tensor).tobytes()


@given(
    st.integers(1, 12),
    st.sampled_from(FLOATS),
    st.sampled_from([None, *OUTPUTS]),
    st.booleans(),
    st.integers(-8, 4),
    st.integers(0, 2**31),
)
def test_the_bytes_are_those_of_torch(n, dtype, output, equal, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0**exponent  # of fp16 and fp8, also numbers too small to be normal
    made = [torch.randn(40, generator=generator, dtype=torch.float64) * scale for _ in range(n)]
    tensors = [tensor.clamp(-400, 400).to(dtype) for tensor in made]
    weights = some_weights(n, equal, generator)
    found = mean_of_tensors(tensors, weights, output)
    expected = naive_mean(tensors, weights, output)
    assert found.dtype == expected.dtype
    assert raw(found) == raw(expected)


def test_torchs_number_of_threads_is_as_before_when_all_is_averaged():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert list(in_order(lambda _: torch.get_num_threads() for _ in range(5))) == [1] * 5
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as pool:  # a thread that begins later
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(np.float16, 1e5), (ml_dtypes.bfloat16, 3.4e38), (ml_dtypes.float8_e5m2, 1e5)],
)
def test_a_mean_that_overflows_the_wanted_dtype_is_an_error(dtype, number):
    wanted = np.dtype(dtype)
    with pytest.raises(ValueError, match=f"does not fit into {wanted.name}"):
        weighted_mean([np.array([1, number, 1], np.float32)], [1.0], wanted)


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_weights_that_carry_fp8_out_of_its_range_are_an_error(name, largest):
    """Torch clips e4m3 to its largest number and says nothing."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    most, least = np.array([largest], dtype), np.array([-largest], dtype)
    assert float(weighted_mean([most, least], [1.0, 0.0])[0]) == largest
    with pytest.raises(ValueError, match=f"does not fit into {name}"):
        weighted_mean([most, least], [2.0, -1.0])


def test_float64_as_the_result_holds_sums_that_float32_does_not():
    parts = [torch.tensor([3e38]), torch.tensor([3e38])]
    for weights in ([0.5, 0.5], [0.75, 0.25]):
        found = mean_of_tensors(parts, weights, torch.float64)
        assert found.item() == pytest.approx(3e38)
    with pytest.raises(ValueError, match="the sum does not fit into float32"):
        mean_of_tensors(parts, [0.5, 0.5])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_seen_in_any_dtype(dtype, bad):
    if dtype == torch.float8_e4m3fn and bad == bad:
        bad = float("nan")  # it has no Inf
    broken = torch.tensor([1.0, 2.0, bad, 3.0]).to(dtype)
    assert is_finite(as_array(broken[:2]))
    assert not is_finite(as_array(broken))
    with pytest.raises(ValueError, match="does not fit"):
        mean_of_tensors([torch.ones(4).to(dtype), broken], [0.5, 0.5])


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bytes_are_the_naive_means_whatever_the_threads_and_pieces(monkeypatch, dtype, equal):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(103, 97, generator=generator).to(dtype) for _ in range(7)]
    weights = some_weights(7, equal, generator)
    expected = raw(naive_mean(tensors, weights))
    arrays = [as_array(tensor) for tensor in tensors]
    for threads, piece, block in [(1, 2**19, 2**17), (1, 1000, 300), (2, 1000, 7), (3, 333, 400)]:
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        monkeypatch.setattr(average, "PIECE", piece)
        monkeypatch.setattr(average, "BLOCK", block)
        parts = zip(*map(pieces, arrays), strict=True)
        jobs = [partial(weighted_mean, part, weights, None) for part in parts]
        found = b"".join(result.tobytes() for result in in_order(jobs))
        assert found == expected, (threads, piece, block)
