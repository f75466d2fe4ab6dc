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
REBIASED = np.float32(2.0 ** (127 - 15))
INFINITE = 0x7C00  # the bits of float16's
SMALLEST_NORMAL = np.float32(2.0**-14)  # of float16
HALF_A_BIT = 0x0FFF  # of the mantissa that is left, but for the last: ties go to even


def widen(halves: Array, out: Array) -> None:
    """float16 → float32, into `out`."""
    if "torch" in sys.modules:
        _by_torch(halves, out)
        return
    signed, unsigned = halves.view(np.int16), halves.view(np.uint16)
    if out.size == 0 or signed.max() >= INFINITE or unsigned.max() >= INFINITE + 0x8000:
        out[...] = halves  # Inf or NaN
        return
    bits = out.view(np.int32)
    bits[...] = signed  # the sign is carried upwards
    np.left_shift(bits, MOVED, out=bits)
    np.bitwise_and(bits, SIGN_AND_REST, out=bits)
    np.multiply(out, REBIASED, out=out)  # exact, also for what is below the smallest normal one


def narrow(wide: Array, out: Array, scratch: Array) -> None:
    """float32 → float16, to the nearest, ties to even, into `out`; NaN becomes Inf."""
    if "torch" in sys.modules:
        _by_torch(wide, out)
        return
    sign = np.right_shift(wide.view(np.uint32), 16).astype(np.uint16)
    sign &= np.uint16(0x8000)
    size, bits = np.abs(wide, out=scratch), scratch.view(np.int32)
    is_below = size < SMALLEST_NORMAL
    # of a number between a half and one, the last bit is worth what float16's very last is
    below = (size + np.float32(0.5)).view(np.int32) - np.float32(0.5).view(np.int32)
    odd = np.right_shift(bits, MOVED)
    odd &= 1
    bits += odd
    bits += HALF_A_BIT - ((127 - 15) << 23)
    np.right_shift(bits, MOVED, out=bits)
    np.minimum(bits, INFINITE, out=bits)
    np.copyto(bits, below, where=is_below)
    np.bitwise_or(bits.astype(np.uint16), sign, out=out.view(np.uint16))


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
