"""Rotated numbers to codes and norms and back: turbo4 and turbo3.

A group that is a whole vector lies in both halves of a tile: it is multiplied with the quarters of
a matrix of +-1, of which two are equal. A half of a vector that is one or two groups is multiplied
with the whole matrix, its groups as rows. What tensor cores add up is sqrt(group) times what an
orthonormal rotation gives.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import triton
import triton.language as tl

from coldpage.kernels.cold.formats import ColdFormat
from coldpage.kernels.cold.gpu_codes import F16_LIMIT
from coldpage.kernels.cold.gpu_vectors import IS_TURBO4
from coldpage.kernels.cold.numbers import MAGNITUDES, THRESHOLDS, TURBO3_STEP

__all__ = [
    "byte_tables",
    "load_matrices",
    "one_of_4",
    "pack_rotated",
    "turbo4_numbers",
    "unrotated",
]

_TURBO4: Final = MAGNITUDES[ColdFormat.TURBO4]
_TURBO3: Final = MAGNITUDES[ColdFormat.TURBO3]
_NUMBERS_4 = tl.constexpr(_TURBO4)
_LIMITS_4 = tl.constexpr(THRESHOLDS[ColdFormat.TURBO4])
_LIMITS_3 = tl.constexpr(THRESHOLDS[ColdFormat.TURBO3])

# Squares of magnitudes are added up as whole numbers of 16 bits.
_PER_SQUARE: Final = 8192.0
_SQUARE = tl.constexpr(1 / _PER_SQUARE)
_WHOLE_4: Final = tuple(round(m * m * _PER_SQUARE) for m in _TURBO4)
_SQUARES_4 = tl.constexpr(_WHOLE_4)

_STEP = tl.constexpr(TURBO3_STEP)
# Packing knows a magnitude of turbo3 by its lowest two bits, which no sum of them misses.
_MARKED: Final = np.array(_TURBO3, np.float32).view(np.uint32) & ~np.uint32(3) | np.arange(4)
_MARKED_3 = tl.constexpr(tuple(_MARKED.astype(np.uint32).view(np.float32).tolist()))
# Where products are smaller, squares are 0 in f32, and norms with them.
_LEAST_PRODUCT = tl.constexpr(2.0**-100)


def byte_tables(numbers: np.ndarray) -> list[str]:
    """Of eight numbers of 16 bits, the low bytes and the high ones: two registers each, in which a
    byte permutation looks up."""
    planes = numbers.astype("<u2").view(np.uint8).reshape(8, 2).T.copy().view("<u4")
    return [f"0x{first:08X}, 0x{second:08X}" for first, second in planes.tolist()]


_F16_LOW, _F16_HIGH = byte_tables(np.array(_TURBO4, np.float16).view(np.uint16))
_SQUARE_LOW, _SQUARE_HIGH = byte_tables(np.array(_WHOLE_4, np.uint16))

# Four bytes at a time, of which each half is one code. A permutation looks up four of them; where
# bit 3 is set it fills bytes with the highest bit of what it would take.
_NUMBERS_ASM = tl.constexpr(
    f"""{{
    .reg .b32 t, l, h, s;
    and.b32 t, $4, 0x77777777;
    prmt.b32 l, {_F16_LOW}, t;
    prmt.b32 h, {_F16_HIGH}, t;
    prmt.b32 s, 0x80808080, 0x80808080, $4;
    shl.b32 s, s, 1;
    lop3.b32 h, h, s, 0x80808080, 0x78;
    prmt.b32 $0, l, h, 0x6240;
    prmt.b32 $2, l, h, 0x7351;
    shr.u32 t, t, 16;
    shr.u32 s, $4, 16;
    prmt.b32 l, {_F16_LOW}, t;
    prmt.b32 h, {_F16_HIGH}, t;
    prmt.b32 s, 0x80808080, 0x80808080, s;
    shl.b32 s, s, 1;
    lop3.b32 h, h, s, 0x80808080, 0x78;
    prmt.b32 $1, l, h, 0x6240;
    prmt.b32 $3, l, h, 0x7351;
    }}"""
)
_SQUARES_ASM = tl.constexpr(
    f"""{{
    .reg .b32 t, l, h, p;
    and.b32 t, $8, 0x77777777;
    prmt.b32 l, {_SQUARE_LOW}, t;
    prmt.b32 h, {_SQUARE_HIGH}, t;
    prmt.b32 p, l, h, 0x5140;
    and.b32 $0, p, 0xFFFF;
    shr.u32 $4, p, 16;
    prmt.b32 p, l, h, 0x7362;
    and.b32 $1, p, 0xFFFF;
    shr.u32 $5, p, 16;
    shr.u32 t, t, 16;
    prmt.b32 l, {_SQUARE_LOW}, t;
    prmt.b32 h, {_SQUARE_HIGH}, t;
    prmt.b32 p, l, h, 0x5140;
    and.b32 $2, p, 0xFFFF;
    shr.u32 $6, p, 16;
    prmt.b32 p, l, h, 0x7362;
    and.b32 $3, p, 0xFFFF;
    shr.u32 $7, p, 16;
    }}"""
)


@triton.jit
def load_matrices(matrix, GROUP: tl.constexpr, IS_ONE_GROUP: tl.constexpr, IS_BACK: tl.constexpr):
    """The matrix [GROUP, GROUP], or its quarters that differ: the upper left one, and those of the
    lower rows or, backwards, of the right columns."""
    if IS_ONE_GROUP:
        HALF: tl.constexpr = GROUP // 2
        index = tl.arange(0, HALF)
        first = matrix + index[:, None] * GROUP + index[None, :]
        other = first + (HALF if IS_BACK else HALF * GROUP)
        last = first + HALF * GROUP + HALF
        result = (tl.load(first), tl.load(other), tl.load(last))
    else:
        index = tl.arange(0, GROUP)
        result = (tl.load(matrix + index[:, None] * GROUP + index[None, :]),)
    return result


@triton.jit
def pack_rotated(low, high, matrices, TILES: tl.constexpr):
    """Halves of vectors as codes int32 of the same shape, and norms f16 [rows, groups]."""
    low, high = low.to(matrices[0].dtype), high.to(matrices[0].dtype)
    ROWS: tl.constexpr = low.shape[0]
    PER_HALF: tl.constexpr = max(1, TILES.groups // 2)
    if TILES.groups == 1:
        first, lower, last = matrices
        new_low = tl.dot(high, lower, tl.dot(low, first))
        new_high = tl.dot(high, last, tl.dot(low, first))
    else:
        new_low = tl.dot(tl.reshape(low, [ROWS * PER_HALF, TILES.group]), matrices[0])
        new_high = tl.dot(tl.reshape(high, [ROWS * PER_HALF, TILES.group]), matrices[0])
    squares = _group_sums(new_low * new_low, new_high * new_high, TILES)
    if TILES.kind == IS_TURBO4:
        low_codes, high_codes, norms = _turbo4_codes(new_low, new_high, squares, TILES)
    else:
        low_codes, high_codes, norms = _turbo3_codes(new_low, new_high, squares, TILES)
    if TILES.groups == 1:
        norm = norms[0][:, None]
    else:
        # The groups of the lower half come first.
        norm = tl.reshape(tl.join(norms[0], norms[1]), [ROWS, PER_HALF, 2])
        norm = tl.reshape(tl.permute(norm, [0, 2, 1]), [ROWS, 2 * PER_HALF])
        low_codes = tl.reshape(low_codes, [ROWS, TILES.width])
        high_codes = tl.reshape(high_codes, [ROWS, TILES.width])
    return low_codes, high_codes, norm


@triton.jit
def _group_sums(low, high, TILES: tl.constexpr):
    """Of the numbers of the groups that are rows of the two halves, or together one group."""
    low_sum, high_sum = tl.sum(low, 1), tl.sum(high, 1)
    if TILES.groups == 1:
        low_sum += high_sum
        high_sum = low_sum
    return low_sum, high_sum


@triton.jit
def _unit(squares, TILES: tl.constexpr):
    """The root mean square."""
    return tl.sqrt(squares * (1.0 / TILES.group))


@triton.jit
def _turbo4_codes(low, high, squares, TILES: tl.constexpr):
    """Of groups with these sums of squares: codes int32 and norms f16, of both halves."""
    low_codes = _turbo4_code(low, _unit(squares[0], TILES)[:, None])
    high_codes = _turbo4_code(high, _unit(squares[1], TILES)[:, None])
    low_squares, high_squares = _code_squares(low_codes, high_codes, TILES)
    low_norm = _turbo4_norm(squares[0], low_squares, TILES)
    high_norm = _turbo4_norm(squares[1], high_squares, TILES)
    return low_codes, high_codes, (low_norm, high_norm)


@triton.jit
def _turbo4_norm(squares, code_squares, TILES: tl.constexpr):
    """What makes codes' numbers as long as a group was, f16: of sums of squares."""
    ratio = squares / (code_squares.to(tl.float32) * (_SQUARE * TILES.group))
    return tl.minimum(tl.sqrt(ratio), F16_LIMIT).to(tl.float16)


@triton.jit
def _turbo4_code(numbers, unit):
    """Codes of the nearest numbers: comparisons, each with a threshold that depends on those
    before."""
    size = tl.abs(numbers)
    is_4 = size > unit * _LIMITS_4[3]
    is_2 = size > tl.where(is_4, unit * _LIMITS_4[5], unit * _LIMITS_4[1])
    if_2 = tl.where(is_4, _marked(unit * _LIMITS_4[6], 6), _marked(unit * _LIMITS_4[2], 2))
    if_not = tl.where(is_4, _marked(unit * _LIMITS_4[4], 4), _marked(unit * _LIMITS_4[0], 0))
    limit = tl.where(is_2, if_2, if_not)
    code = (limit.to(tl.int32, bitcast=True) & 6) | (size > limit).to(tl.int32)
    return code | ((numbers.to(tl.int32, bitcast=True) >> 31) & 8)


@triton.jit
def _marked(limit, MARK: tl.constexpr):
    """A threshold whose lowest bits, which it does not miss, are the upper ones of the code."""
    return ((limit.to(tl.int32, bitcast=True) & -8) | MARK).to(tl.float32, bitcast=True)


@triton.jit
def _code_squares(low, high, TILES: tl.constexpr):
    """The sums of the squares of both codes' numbers, whole ones, int32 [rows]."""
    if TILES.is_asm:
        low, high = tl.inline_asm_elementwise(
            _SQUARES_ASM,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [(low | (high << 4)).to(tl.uint8)],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = _square(low), _square(high)
    return _group_sums(low, high, TILES)


@triton.jit
def _square(code):
    upper = one_of_4(code, _SQUARES_4[4], _SQUARES_4[5], _SQUARES_4[6], _SQUARES_4[7])
    lower = one_of_4(code, _SQUARES_4[0], _SQUARES_4[1], _SQUARES_4[2], _SQUARES_4[3])
    return tl.where((code & 4) != 0, upper, lower)


@triton.jit
def _turbo3_codes(low, high, squares, TILES: tl.constexpr):
    """Of groups with these sums of squares: codes int32 and norms f16, of both halves."""
    low_size, high_size = tl.abs(low), tl.abs(high)
    low_unit, high_unit = _unit(squares[0], TILES), _unit(squares[1], TILES)
    low_number, high_number = _nearest(low_size, low_unit), _nearest(high_size, high_unit)
    products = _group_sums(low_size * low_number, high_size * high_number, TILES)
    lengths = _group_sums(low_number * low_number, high_number * high_number, TILES)
    low_unit += _STEP * (products[0] / lengths[0] - low_unit)
    high_unit += _STEP * (products[1] / lengths[1] - high_unit)
    low_number, high_number = _nearest(low_size, low_unit), _nearest(high_size, high_unit)
    products = _group_sums(low_size * low_number, high_size * high_number, TILES)
    low_norm = _turbo3_norm(squares[0], products[0], TILES)
    high_norm = _turbo3_norm(squares[1], products[1], TILES)
    return _turbo3_code(low, low_number), _turbo3_code(high, high_number), (low_norm, high_norm)


@triton.jit
def _nearest(size, unit):
    """The marked magnitudes nearest to sizes [rows, columns] in units [rows]."""
    unit = unit[:, None]
    number = tl.where(size > unit * _LIMITS_3[0], _MARKED_3[1], _MARKED_3[0])
    number = tl.where(size > unit * _LIMITS_3[1], _MARKED_3[2], number)
    return tl.where(size > unit * _LIMITS_3[2], _MARKED_3[3], number)


@triton.jit
def _turbo3_norm(squares, products, TILES: tl.constexpr):
    """What gives codes' numbers and a group the product that the group has with itself, f16."""
    ratio = squares / (tl.maximum(products, _LEAST_PRODUCT) * TILES.group**0.5)
    return tl.minimum(ratio, F16_LIMIT).to(tl.float16)


@triton.jit
def _turbo3_code(number, magnitude):
    sign = (number.to(tl.int32, bitcast=True) >> 31) & 4
    return (magnitude.to(tl.int32, bitcast=True) & 3) | sign


@triton.jit
def one_of_4(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """One of four numbers, by the lowest two bits of a code."""
    is_odd = (code & 1) != 0
    return tl.where((code & 2) != 0, tl.where(is_odd, D, C), tl.where(is_odd, B, A))


@triton.jit
def turbo4_numbers(packed, TILES: tl.constexpr):
    """The numbers of the codes in the low and in the high halves of bytes, f16 or f32."""
    if TILES.is_asm:
        low, high = tl.inline_asm_elementwise(
            _NUMBERS_ASM,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = _turbo4_number(packed.to(tl.int32))
        high = _turbo4_number(packed.to(tl.int32) >> 4)
    return low, high


@triton.jit
def _turbo4_number(code):
    upper = one_of_4(code, _NUMBERS_4[4], _NUMBERS_4[5], _NUMBERS_4[6], _NUMBERS_4[7])
    lower = one_of_4(code, _NUMBERS_4[0], _NUMBERS_4[1], _NUMBERS_4[2], _NUMBERS_4[3])
    size = tl.where((code & 4) != 0, upper, lower)
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def unrotated(low, high, norms, matrices, TILES: tl.constexpr):
    """Numbers of codes and norms f32 of the groups, a tuple of [rows], as halves of vectors f32."""
    low, high = low.to(matrices[0].dtype), high.to(matrices[0].dtype)
    UNIT: tl.constexpr = TILES.group**-0.5
    if TILES.groups == 1:
        first, right, last = matrices
        norm = norms[0][:, None] * UNIT
        new_low = tl.dot(high, first, tl.dot(low, first)) * norm
        new_high = tl.dot(high, last, tl.dot(low, right)) * norm
    else:
        ROWS: tl.constexpr = low.shape[0]
        PER_HALF: tl.constexpr = TILES.groups // 2
        new_low = tl.dot(tl.reshape(low, [ROWS * PER_HALF, TILES.group]), matrices[0])
        new_high = tl.dot(tl.reshape(high, [ROWS * PER_HALF, TILES.group]), matrices[0])
        if PER_HALF == 1:
            new_low = new_low * (norms[0] * UNIT)[:, None]
            new_high = new_high * (norms[1] * UNIT)[:, None]
        else:
            low_norm = tl.reshape(tl.join(norms[0], norms[1]) * UNIT, [ROWS * PER_HALF])
            high_norm = tl.reshape(tl.join(norms[2], norms[3]) * UNIT, [ROWS * PER_HALF])
            new_low = tl.reshape(new_low * low_norm[:, None], [ROWS, TILES.width])
            new_high = tl.reshape(new_high * high_norm[:, None], [ROWS, TILES.width])
    return new_low, new_high
