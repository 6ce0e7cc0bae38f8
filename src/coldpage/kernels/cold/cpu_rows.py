"""What loops over a page do to one row of numbers: compiled, for a CPU.

A row is the numbers of a vector, or of a group of one, f32, next to each other. Loops run over the
numbers of a row and have no branches, so that they become vector instructions. Codes are rounded by
adding 1.5 * 2**23, above which f32 has whole numbers only: the low bits are then the number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.cpu_compile import compiled
from coldpage.kernels.cold.numbers import FP8_MAX

__all__ = [
    "fp8_codes",
    "fp8_numbers",
    "int8_codes",
    "int8_numbers",
    "inverse",
    "largest_size",
    "levels_of",
    "nibbles_of",
    "scale_and_add",
    "smallest_and_largest",
    "subtract_and_scale",
]

_Row = npt.NDArray[np.float32]
_Codes = npt.NDArray[np.uint8]

_F = np.float32
_I = np.int32
_ROUNDING = _F(1.5 * 2.0**23)
_MAGNITUDE_BITS = _I(0x7FFFFFFF)

# e4m3 counts exponents from 2**-7 on, f32 from 2**-127; steps below 2**-6 are 2**-9 wide.
_FP8_MAX = _F(FP8_MAX)
_FP8_EXPONENTS = _I(127 - 7)
_FP8_FIRST_NORMAL = _F(2.0**-6)
_FP8_STEP = _F(2.0**-9)
_FP8_ROUNDING = _F(2.0**14)  # the distance between f32 numbers from here on is 2**-9
_FP8_ROUNDING_BITS = _I((127 + 14) << 23)


@compiled
def inverse(number: Any) -> Any:
    """1 / ``number``, and 0 for 0."""
    return _F(1) / number if number > _F(0) else _F(0)


@compiled
def largest_size(row: _Row) -> Any:
    """The largest magnitude. As bits, since the maximum of whole numbers is one in any order."""
    bits = row.view(np.int32)
    largest = _I(0)
    for i in range(row.size):
        largest = max(largest, _I(bits[i] & _MAGNITUDE_BITS))
    return _I(largest).view(np.float32)


@compiled
def smallest_and_largest(row: _Row) -> Any:
    """A pair."""
    smallest = largest = row[0]
    for i in range(row.size):
        smallest = min(smallest, row[i])
        largest = max(largest, row[i])
    return smallest, largest


@compiled
def scale_and_add(row: _Row, factor: Any, addend: Any) -> None:
    """``row = row * factor + addend``."""
    for i in range(row.size):
        row[i] = row[i] * factor + addend


@compiled
def subtract_and_scale(row: _Row, subtrahend: Any, factor: Any) -> None:
    """``row = (row - subtrahend) * factor``."""
    for i in range(row.size):
        row[i] = (row[i] - subtrahend) * factor


@compiled
def int8_codes(row: _Row, inverse_scale: Any, codes: _Codes) -> None:
    """Nearest whole numbers from -127 to 127."""
    for i in range(row.size):
        number = min(max(row[i] * inverse_scale, _F(-127)), _F(127))
        codes[i] = np.uint8(_F(number + _ROUNDING).view(np.int32))


@compiled
def int8_numbers(codes: _Codes, scale: Any, row: _Row) -> None:
    """The inverse."""
    signed = codes.view(np.int8)
    for i in range(row.size):
        row[i] = _F(signed[i]) * scale


@compiled
def fp8_codes(row: _Row, inverse_scale: Any, codes: _Codes) -> None:
    """Nearest e4m3 numbers."""
    for i in range(row.size):
        size = min(np.abs(row[i] * inverse_scale), _FP8_MAX)
        bits = _F(size).view(np.int32)
        is_odd = _I(bits >> _I(20)) & _I(1)
        normal = _I(_I(bits + _I(0x7FFFF) + is_odd) >> _I(20)) - _I(_FP8_EXPONENTS << _I(3))
        small = _F(size + _FP8_ROUNDING).view(np.int32) - _FP8_ROUNDING_BITS
        code = _I(normal if size >= _FP8_FIRST_NORMAL else small)
        sign = _I(_F(row[i]).view(np.int32) >> _I(24)) & _I(0x80)
        codes[i] = np.uint8(code | sign)


@compiled
def fp8_numbers(codes: _Codes, scale: Any, row: _Row) -> None:
    """The inverse. Both NaN codes, which are never written, give 480."""
    for i in range(row.size):
        size = _I(codes[i]) & _I(0x7F)
        normal = _I(_I(size << _I(20)) + _I(_FP8_EXPONENTS << _I(23))).view(np.float32)
        number = normal if size >= _I(8) else _F(size) * _FP8_STEP
        signed = _I(_F(number).view(np.int32) | _I(_I(_I(codes[i]) & _I(0x80)) << _I(24)))
        row[i] = signed.view(np.float32) * scale


@compiled
def _level(number: Any) -> Any:
    """The nearest whole number from 0 to 15, as int32."""
    return _F(min(max(number, _F(0)), _F(15)) + _ROUNDING).view(np.int32) & _I(15)


@compiled
def nibbles_of(row: _Row, codes: _Codes) -> None:
    """Nearest whole numbers from 0 to 15, two a byte."""
    low, high = row[: codes.size], row[codes.size :]
    for i in range(codes.size):
        codes[i] = np.uint8(_level(low[i]) | _I(_level(high[i]) << _I(4)))


@compiled
def levels_of(codes: _Codes, row: _Row) -> None:
    """The inverse."""
    low, high = row[: codes.size], row[codes.size :]
    for i in range(codes.size):
        low[i] = _F(codes[i] & np.uint8(15))
        high[i] = _F(codes[i] >> np.uint8(4))
