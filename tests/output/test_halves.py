"""float16 and back by their bits: NumPy's own conversion is the slow twin."""

from __future__ import annotations

import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from sewa_cli.dtypes import Array
from sewa_cli.output.halves import narrow, widen

EVERY = np.arange(65536, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]


@pytest.fixture(params=["bits", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bits":
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        pytest.importorskip("torch")
    return str(request.param)


def widened(halves: Array) -> Array:
    out = np.empty(halves.shape, np.float32)
    widen(halves, out)
    return out


def narrowed(wide: Array) -> Array:
    out, before = np.empty(wide.shape, np.float16), wide.copy()
    narrow(wide, out, np.empty_like(wide))
    assert wide.tobytes() == before.tobytes()  # what was given is as it was
    return out


@pytest.mark.usefixtures("way")
def test_every_float16_is_widened_to_the_bits_of_numpy() -> None:
    for some in (FINITE, FINITE[1::3], EVERY[EVERY < 0], FINITE[:0], FINITE[::-1]):
        assert widened(some).tobytes() == some.astype(np.float32).tobytes()


def test_inf_and_nan_stay_what_they_are(way: str) -> None:
    found = widened(EVERY)
    assert np.array_equal(found, EVERY.astype(np.float32), equal_nan=True)
    if way == "bits":
        assert found.tobytes() == EVERY.astype(np.float32).tobytes()


@pytest.mark.usefixtures("way")
def test_what_lies_between_two_float16_is_rounded_to_the_bits_of_numpy() -> None:
    with np.errstate(over="ignore"):
        next_ones = np.nextafter(FINITE, np.float16(np.inf)).astype(np.float32)
        middle = (FINITE.astype(np.float32) + next_ones) / 2
        for some in (middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)):
            some = some.astype(np.float32)
            assert narrowed(some).tobytes() == some.astype(np.float16).tobytes()


@given(
    arrays(np.uint32, st.integers(0, 50), elements=st.integers(0, 2**32 - 1)), st.integers(-30, 20)
)
def test_any_float32_is_rounded_to_the_bits_of_numpy(bits: Array, exponent: int) -> None:
    near = np.uint32((exponent + 127) << 23)
    for wide in (bits.view(np.float32), (bits & 0x807FFFFF | near).view(np.float32)):
        wide = wide[~np.isnan(wide)]
        with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
            patch.delitem(sys.modules, "torch", raising=False)
            assert narrowed(wide).tobytes() == wide.astype(np.float16).tobytes()


def test_nan_does_not_become_a_number(way: str) -> None:
    found = narrowed(np.array([np.nan, -np.nan, 1.0], np.float32))
    assert not np.isfinite(found[:2]).any(), way
    assert found[2] == 1.0
