"""Hot numbers to f32 and back, f16 parameters, and the sines of phases: compiled, for a CPU.

All of it is arithmetic on bits without branches, so that loops become vector instructions. A hot
number that is NaN, infinite or beyond 2**60 counts as 0; everything after that is finite.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.cpu_compile import carray, compiled, pointer_to
from coldpage.kernels.cold.formats import NumberType
from coldpage.kernels.cold.numbers import F16_MAX, LARGEST_HOT, RADIANS_PER_STEP

__all__ = [
    "NUMBER_KINDS",
    "bytes_at",
    "f16_above",
    "f16_below",
    "f16_nearest",
    "f16_number",
    "fill_turns",
    "halves_at",
    "load_numbers",
    "store_numbers",
]

_FloatArray = npt.NDArray[np.float32]

NUMBER_KINDS: Final = {NumberType.BF16: 0, NumberType.F16: 1, NumberType.F32: 2}
"""Numbers of the types of hot pages, as compiled functions know them."""

_F = np.float32
_I = np.int32
_MAGNITUDE_BITS = _I(0x7FFFFFFF)
_SIGN_BIT = _I(-(2**31))
_LARGEST_BITS = _I(np.float32(LARGEST_HOT).view(np.int32))

# f16 has exponents from 2**-14 on, f32 counts them from 2**-127.
_F16_EXPONENTS = _I((127 - 15) << 23)
_F16_EXPONENTS_16 = _I((127 - 15) << 10)
_F16_FIRST_NORMAL = _F(2.0**-14)
_F16_STEP = _F(2.0**-24)
_F16_STEPS = _F(2.0**24)
_HALF = _F(0.5)  # the distance between f32 numbers from here on is 2**-24
_HALF_BITS = _I(0x3F000000)
_F16_MAX = _F(F16_MAX)


@compiled
def bytes_at(address: int, num_bytes: int) -> Any:
    """The memory there, uint8 [num_bytes]."""
    return carray(pointer_to(address), (num_bytes,), np.uint8)


@compiled
def halves_at(address: int, num_halves: int) -> Any:
    """The memory there, uint16 [num_halves]."""
    return carray(pointer_to(address), (num_halves,), np.uint16)


@compiled
def _floats_at(address: int, num_floats: int) -> Any:
    return carray(pointer_to(address), (num_floats,), np.float32)


@compiled
def load_numbers(address: int, kind: int, x: _FloatArray) -> None:
    """Fill ``x`` [n] with the hot numbers of one of NUMBER_KINDS at ``address``."""
    if kind == 0:
        _load_bf16(address, x)
    elif kind == 1:
        _load_f16(address, x)
    else:
        _load_f32(address, x)


@compiled
def _clean(bits: Any) -> Any:
    return bits if (bits & _MAGNITUDE_BITS) <= _LARGEST_BITS else _I(0)


@compiled
def _load_bf16(address: int, x: _FloatArray) -> None:
    numbers, bits = halves_at(address, x.size), x.view(np.int32)
    for i in range(x.size):
        bits[i] = _clean(_I(_I(numbers[i]) << _I(16)))


@compiled
def _load_f16(address: int, x: _FloatArray) -> None:
    numbers, bits = halves_at(address, x.size), x.view(np.int32)
    for i in range(x.size):
        number = _I(numbers[i])
        size = _I(number & _I(0x7FFF))
        wide = _F(f16_number(size)).view(np.int32)
        wide = wide if size < _I(0x7C00) else _I(0)
        bits[i] = wide | _I((number & _I(0x8000)) << _I(16))


@compiled
def _load_f32(address: int, x: _FloatArray) -> None:
    numbers, bits = _floats_at(address, x.size).view(np.int32), x.view(np.int32)
    for i in range(x.size):
        bits[i] = _clean(numbers[i])


@compiled
def store_numbers(x: _FloatArray, address: int, kind: int) -> None:
    """The inverse: round ``x`` [n] to nearest even, f16 to its largest at most."""
    if kind == 0:
        _store_bf16(x, address)
    elif kind == 1:
        _store_f16(x, address)
    else:
        numbers = _floats_at(address, x.size)
        for i in range(x.size):
            numbers[i] = x[i]


@compiled
def _store_bf16(x: _FloatArray, address: int) -> None:
    numbers, bits = halves_at(address, x.size), x.view(np.int32)
    for i in range(x.size):
        number = bits[i]
        is_odd = _I(number >> _I(16)) & _I(1)
        numbers[i] = np.uint16(_I(number + _I(0x7FFF) + is_odd) >> _I(16))


@compiled
def _store_f16(x: _FloatArray, address: int) -> None:
    numbers, bits = halves_at(address, x.size), x.view(np.int32)
    for i in range(x.size):
        size = f16_nearest(min(np.abs(x[i]), _F16_MAX))
        numbers[i] = np.uint16(size | (_I(bits[i] >> _I(16)) & _I(0x8000)))


@compiled
def f16_number(size: Any) -> Any:
    """The f32 number of an f16 without its sign, given as int32."""
    normal = _I(_I(size << _I(13)) + _F16_EXPONENTS).view(np.float32)
    return normal if size >= _I(0x400) else _F(size) * _F16_STEP


@compiled
def f16_nearest(number: Any) -> Any:
    """The bits (int32) of the f16 nearest to a number from 0 to F16_MAX, halves to even."""
    bits = _F(number).view(np.int32)
    is_odd = _I(bits >> _I(13)) & _I(1)
    normal = _I(_I(bits + _I(0xFFF) + is_odd) >> _I(13)) - _F16_EXPONENTS_16
    small = _F(_F(number) + _HALF).view(np.int32) - _HALF_BITS
    return _I(normal if number >= _F16_FIRST_NORMAL else small)


@compiled
def f16_above(number: Any) -> Any:
    """The bits (int32) of the smallest f16 that is no smaller than a number from 0 on, and the
    largest there is for those above."""
    size = min(_F(number), _F16_MAX)
    normal = _I(_I(_F(size).view(np.int32) + _I(0x1FFF)) >> _I(13)) - _F16_EXPONENTS_16
    small = _I(np.ceil(size * _F16_STEPS))
    return _I(normal if size >= _F16_FIRST_NORMAL else small)


@compiled
def f16_below(number: Any) -> Any:
    """The bits (int32) of the largest f16 that is no larger than a number of any sign, and the
    smallest there is for those below."""
    size = min(np.abs(_F(number)), _F16_MAX)
    normal = _I(_F(size).view(np.int32) >> _I(13)) - _F16_EXPONENTS_16
    small = _I(size * _F16_STEPS)
    towards_zero = _I(normal if size >= _F16_FIRST_NORMAL else small)
    return towards_zero if number >= _F(0) else _I(f16_above(size) | _I(0x8000))


# Taylor's coefficients: up to an eighth of a turn what is left out is below 3e-9 and 3e-8.
_S3, _S5, _S7, _S9 = _F(-1 / 6), _F(1 / 120), _F(-1 / 5040), _F(1 / 362880)
_C2, _C4, _C6, _C8 = _F(-1 / 2), _F(1 / 24), _F(-1 / 720), _F(1 / 40320)
_ONE = _F(1)
_RADIANS_PER_STEP = _F(RADIANS_PER_STEP)


@compiled
def fill_turns(
    frequencies: npt.NDArray[np.uint32], first_position: Any, cosines: Any, sines: Any
) -> None:
    """Fill f32 [tokens, head_dim / 2] each for the tokens from ``first_position`` on."""
    for token in range(cosines.shape[0]):
        position = np.uint32(first_position + token)
        _fill_row(frequencies, position, cosines[token], sines[token])


@compiled
def _fill_row(frequencies: Any, position: Any, cosines: Any, sines: Any) -> None:
    for i in range(cosines.size):
        steps = np.uint32(position * frequencies[i])
        quarter = np.uint32(np.uint32(steps + np.uint32(1 << 29)) >> np.uint32(30))
        rest = _I(steps - np.uint32(quarter << np.uint32(30)))  # at most an eighth of a turn
        x = _F(rest) * _RADIANS_PER_STEP
        square = x * x
        sine = x + x * square * (_S3 + square * (_S5 + square * (_S7 + square * _S9)))
        cosine = _ONE + square * (_C2 + square * (_C4 + square * (_C6 + square * _C8)))
        is_swapped = (quarter & np.uint32(1)) != 0
        a = sine if is_swapped else cosine
        b = cosine if is_swapped else sine
        cosines[i] = -a if quarter == np.uint32(1) or quarter == np.uint32(2) else a
        sines[i] = -b if quarter >= np.uint32(2) else b
