"""float16 to float32 and back: NumPy's own way, bit for bit, several times as fast.

NumPy converts each number by itself. Here a block is converted by whole-array operations on its
bits; where torch is loaded, by the processor's own instructions. (It is not imported for that:
importing it takes seconds.)

    float16   1 sign, 5 exponent (from 15), 10 mantissa
    float32   1 sign, 8 exponent (from 127), 23 mantissa
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

import numpy as np

from sewa_cli.dtypes import Array

MOVED = 13  # places by which mantissa and exponent stand further to the left in float32
SIGN_AND_REST = np.int32(-0x70002000)  # 0x8FFFE000: what a float16 fills of a float32 then
SHRUNK_BY = np.float32(2.0 ** (127 - 15))  # as float32's exponent counts from elsewhere
INFINITE = 0x7C00  # the bits of float16's
SMALLEST_NORMAL = np.float32(2.0**-14)  # of float16
HALF_A_BIT = 0x0FFF  # of the mantissa that is left, but for the last: ties go to even


def shrunk(halves: Array, out: Array) -> Array:
    """float16 → float32, 2¹¹² times smaller, into `out`: just the bits, put into their places.

    Nothing is lost: float16's smallest number is still 2¹³ times float32's, so sums of them are
    rounded as they would be at their own size. Made larger once, they need no pass over each.
    """
    bits = out.view(np.int32)
    bits[...] = halves.view(np.int16)  # the sign is carried upwards
    if has_inf_or_nan(halves):  # now that they have come into the cache
        out[...] = halves
        return np.divide(out, SHRUNK_BY, out=out)
    np.left_shift(bits, MOVED, out=bits)
    np.bitwise_and(bits, SIGN_AND_REST, out=bits)
    return out


def widen(halves: Array, out: Array) -> None:
    """float16 → float32, into `out`."""
    if not by_bits():
        _by_torch(halves, out)
    elif has_inf_or_nan(halves):
        out[...] = halves
    else:
        np.multiply(shrunk(halves, out), SHRUNK_BY, out=out)


def has_inf_or_nan(halves: Array) -> bool:
    if halves.size == 0:
        return False
    signed, unsigned = halves.view(np.int16), halves.view(np.uint16)
    return bool(signed.max() >= INFINITE or unsigned.max() >= INFINITE + 0x8000)


def narrow(wide: Array, out: Array, scratch: Array) -> None:
    """float32 → float16, to the nearest, ties to even, into `out`; NaN becomes Inf."""
    if not by_bits():
        _by_torch(wide, out)
        return
    sign = np.right_shift(wide.view(np.int32), 16, out=scratch.view(np.int32))
    np.bitwise_and(sign, -0x8000, out=out.view(np.int16), casting="unsafe")
    size, bits = np.abs(wide, out=scratch), scratch.view(np.int32)
    below = np.flatnonzero(size < SMALLEST_NORMAL)
    # of a number between a half and one, the last bit is worth what float16's very last is
    small = (size[below] + np.float32(0.5)).view(np.int32) - np.float32(0.5).view(np.int32)
    odd = np.right_shift(bits, MOVED)
    odd &= 1
    bits += odd
    bits += HALF_A_BIT - ((127 - 15) << 23)
    np.right_shift(bits, MOVED, out=bits)
    np.minimum(bits, INFINITE, out=bits)
    bits[below] = small
    np.bitwise_or(out.view(np.int16), bits, out=out.view(np.int16), casting="unsafe")


def by_bits() -> bool:
    return "torch" not in sys.modules


def _by_torch(source: Array, target: Array) -> None:
    """Or by NumPy, never by bits: torch can tell the processor to take small numbers for zero."""
    if source.size == 0 or not (source.flags.c_contiguous and target.flags.c_contiguous):
        target[...] = source
        return
    torch = sys.modules["torch"]
    _hear_the_warning(torch)
    torch.from_numpy(target.reshape(-1)).copy_(torch.from_numpy(source.reshape(-1)))


@cache
def _hear_the_warning(torch: Any) -> None:
    """Torch warns, once, of memory that cannot be written to, as a mapped file's. Nobody does."""
    read_only = np.zeros(1, np.float16)
    read_only.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(read_only)
