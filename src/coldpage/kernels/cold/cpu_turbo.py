"""Rows of the rotated formats: the transform, codebooks and how codes lie. Compiled, for a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.cpu_compile import compiled
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.kernels.cold.numbers import MAGNITUDES, THRESHOLDS, TURBO3_STEP

__all__ = [
    "hadamard_transform",
    "length_squared",
    "multiply",
    "turbo3_bits",
    "turbo3_codes_of",
    "turbo3_numbers",
    "turbo3_unit",
    "turbo4_nibbles",
    "turbo4_numbers",
    "turbo4_squares",
]

_Row = npt.NDArray[np.float32]
_Codes = npt.NDArray[np.uint8]

_F = np.float32
_I = np.int32
_ZERO = _F(0)
_T1, _T2, _T3, _T4, _T5, _T6, _T7 = (_F(t) for t in THRESHOLDS[ColdFormat.TURBO4])
_M0, _M1, _M2, _M3, _M4, _M5, _M6, _M7 = (_F(m) for m in MAGNITUDES[ColdFormat.TURBO4])
_U1, _U2, _U3 = (_F(t) for t in THRESHOLDS[ColdFormat.TURBO3])
_N0, _N1, _N2, _N3 = (_F(m) for m in MAGNITUDES[ColdFormat.TURBO3])
_STEP = _F(TURBO3_STEP)
_ONE = _F(1)


@compiled
def length_squared(row: _Row) -> Any:
    """The sum of squares."""
    total = _ZERO
    for i in range(row.size):
        total += row[i] * row[i]
    return total


@compiled
def multiply(row: _Row, factors: _Row, factor: Any) -> None:
    """``row = row * factors * factor``. In place, since the compiler takes a vector loop only where
    what it writes overlaps nothing else."""
    for i in range(row.size):
        row[i] *= factors[i] * factor


@compiled
def hadamard_transform(row: _Row, spare: _Row, product: _Row) -> None:
    """``product = row @ hadamard``, for 64 or 128 numbers; ``row`` and ``spare`` are overwritten.

    Every step takes sums and differences of neighbours to the two halves of its result, which
    leaves the next bit of the index where this one was: after as many steps as the index has bits,
    each is back in its place. Written so, every step is the same, and none works on parts of a
    vector register.
    """
    if row.size == 128:
        _half_step(row, spare, 64)
        _half_step(spare, row, 64)
        _half_step(row, spare, 64)
        _half_step(spare, row, 64)
        _half_step(row, spare, 64)
        _half_step(spare, row, 64)
        _half_step(row, product, 64)
    else:
        _half_step(row, spare, 32)
        _half_step(spare, row, 32)
        _half_step(row, spare, 32)
        _half_step(spare, row, 32)
        _half_step(row, spare, 32)
        _half_step(spare, product, 32)


@compiled
def _half_step(row: _Row, result: _Row, half: int) -> None:
    sums, differences = result[:half], result[half:]
    for i in range(half):
        a, b = row[2 * i], row[2 * i + 1]
        sums[i] = a + b
        differences[i] = a - b


@compiled
def _turbo4_code(number: Any) -> Any:
    size = np.abs(number)
    code = _I(size > _T1) + _I(size > _T2) + _I(size > _T3) + _I(size > _T4)
    code += _I(size > _T5) + _I(size > _T6) + _I(size > _T7)
    return _I(code | _I(_I(number < _ZERO) << _I(3)))


@compiled
def turbo4_nibbles(row: _Row, codes: _Codes) -> None:
    """Codes of rotated numbers with a root mean square of 1, two a byte."""
    low, high = row[: codes.size], row[codes.size :]
    for i in range(codes.size):
        codes[i] = np.uint8(_turbo4_code(low[i]) | _I(_turbo4_code(high[i]) << _I(4)))


@compiled
def turbo4_squares(row: _Row) -> Any:
    """The sum of the squares of the numbers that the codes of these stand for."""
    total = _ZERO
    for i in range(row.size):
        size = np.abs(row[i])
        number = _M1 if size > _T1 else _M0
        number = _M2 if size > _T2 else number
        number = _M3 if size > _T3 else number
        number = _M4 if size > _T4 else number
        number = _M5 if size > _T5 else number
        number = _M6 if size > _T6 else number
        number = _M7 if size > _T7 else number
        total += number * number
    return total


@compiled
def _turbo4_number(code: Any) -> Any:
    is_1, is_2 = (code & _I(1)) != 0, (code & _I(2)) != 0
    low = (_M3 if is_1 else _M2) if is_2 else (_M1 if is_1 else _M0)
    high = (_M7 if is_1 else _M6) if is_2 else (_M5 if is_1 else _M4)
    size = high if (code & _I(4)) != 0 else low
    return -size if (code & _I(8)) != 0 else size


@compiled
def turbo4_numbers(codes: _Codes, row: _Row) -> None:
    """What the codes stand for."""
    low, high = row[: codes.size], row[codes.size :]
    for i in range(codes.size):
        byte = _I(codes[i])
        low[i] = _turbo4_number(byte)
        high[i] = _turbo4_number(_I(byte >> _I(4)))


@compiled
def turbo3_unit(row: _Row) -> Any:
    """What to measure rotated numbers with a root mean square of 1 by; 0 if all are 0."""
    product = squares = _ZERO
    for i in range(row.size):
        size = np.abs(row[i])
        number = _N1 if size > _U1 else _N0
        number = _N2 if size > _U2 else number
        number = _N3 if size > _U3 else number
        product += size * number
        squares += number * number
    return max(_ONE + _STEP * (product / squares - _ONE), _ZERO)


@compiled
def turbo3_codes_of(row: _Row, unit: Any, codes: _Codes) -> Any:
    """Codes of rotated numbers measured by ``unit``, one a byte; returns the sum of the products of
    the numbers and what their codes stand for."""
    limit_1, limit_2, limit_3 = _U1 * unit, _U2 * unit, _U3 * unit
    product = _ZERO
    for i in range(row.size):
        size = np.abs(row[i])
        is_1, is_2, is_3 = size > limit_1, size > limit_2, size > limit_3
        code = _I(is_1) + _I(is_2) + _I(is_3)
        codes[i] = np.uint8(code | _I(_I(row[i] < _ZERO) << _I(2)))
        number = _N1 if is_1 else _N0
        number = _N2 if is_2 else number
        number = _N3 if is_3 else number
        product += size * number
    return product


@compiled
def turbo3_bits(codes: _Codes, low: _Codes, high: _Codes) -> None:
    """Codes [head_dim] as they are stored: [head_dim / 4] and [head_dim / 8]."""
    quarter, eighth = low.size, high.size
    a, b = codes[:quarter], codes[quarter : 2 * quarter]
    c, d = codes[2 * quarter : 3 * quarter], codes[3 * quarter :]
    for i in range(quarter):
        byte = _I(a[i] & 3) | _I(_I(b[i] & 3) << _I(2))
        low[i] = np.uint8(byte | _I(_I(c[i] & 3) << _I(4)) | _I(_I(d[i] & 3) << _I(6)))
    for i in range(eighth):
        high[i] = np.uint8(0)
    for j in range(8):
        part = codes[j * eighth : (j + 1) * eighth]
        for i in range(eighth):
            high[i] |= np.uint8((_I(part[i]) >> _I(2)) << _I(j))


@compiled
def turbo3_numbers(low: _Codes, high: _Codes, row: _Row) -> None:
    """What stored codes stand for."""
    quarter, eighth = low.size, high.size
    for j in range(4):
        part = row[j * quarter : (j + 1) * quarter]
        for i in range(quarter):
            code = _I(low[i]) >> _I(2 * j)
            is_1 = (code & _I(1)) != 0
            upper = _N3 if is_1 else _N2
            lower = _N1 if is_1 else _N0
            part[i] = upper if (code & _I(2)) != 0 else lower
    for j in range(8):
        part = row[j * eighth : (j + 1) * eighth]
        for i in range(eighth):
            is_negative = ((_I(high[i]) >> _I(j)) & _I(1)) != 0
            part[i] = -part[i] if is_negative else part[i]
