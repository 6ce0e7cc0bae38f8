"""Codes of turbo3 as the bytes of a packed buffer's two parts, and numbers of these."""

from __future__ import annotations

from typing import Final

import numpy as np
import triton
import triton.language as tl

from coldpage.kernels.cold.formats import ColdFormat
from coldpage.kernels.cold.gpu_rotated import byte_tables, one_of_4
from coldpage.kernels.cold.numbers import MAGNITUDES

__all__ = ["three_bit_bytes", "turbo3_numbers"]

_TURBO3: Final = MAGNITUDES[ColdFormat.TURBO3]
_NUMBERS = tl.constexpr(_TURBO3)
_SIGNED: Final = np.array([*_TURBO3, *(-m for m in _TURBO3)], np.float16)
_SIGNED_LOW, _SIGNED_HIGH = byte_tables(_SIGNED.view(np.uint16))

# Four bytes of each part, and where in these the bits of four numbers of the lower half
# begin, which is the same for all of them. Their signs are in the table.
_NUMBERS_ASM = tl.constexpr(
    f"""{{
    .reg .b32 t, s, l, h;
    and.b32 t, $6, 0xFF;
    and.b32 s, $7, 0xFF;
    shr.u32 t, $4, t;
    shr.u32 s, $5, s;
    and.b32 t, t, 0x33333333;
    and.b32 s, s, 0x11111111;
    mad.lo.u32 t, s, 4, t;
    prmt.b32 l, {_SIGNED_LOW}, t;
    prmt.b32 h, {_SIGNED_HIGH}, t;
    prmt.b32 $0, l, h, 0x6240;
    prmt.b32 $2, l, h, 0x7351;
    shr.u32 t, t, 16;
    prmt.b32 l, {_SIGNED_LOW}, t;
    prmt.b32 h, {_SIGNED_HIGH}, t;
    prmt.b32 $1, l, h, 0x6240;
    prmt.b32 $3, l, h, 0x7351;
    }}"""
)


@triton.jit
def three_bit_bytes(low, high):
    """Codes of 3 bits as bytes: their low bits [rows, a quarter of a vector], and their high ones
    [rows, an eighth]."""
    ROWS: tl.constexpr = low.shape[0]
    HALF: tl.constexpr = low.shape[1]
    quarter = 2 * tl.arange(0, 2)[None, :, None]
    two_bits = (low & 3) | ((high & 3) << 4)
    two_bits = tl.sum(tl.reshape(two_bits, [ROWS, 2, HALF // 2]) << quarter, 1)
    eighth = tl.arange(0, 4)[None, :, None]
    one_bit = (low >> 2) | ((high >> 2) << 4)
    one_bit = tl.sum(tl.reshape(one_bit, [ROWS, 4, HALF // 4]) << eighth, 1)
    return two_bits.to(tl.uint8), one_bit.to(tl.uint8)


@triton.jit
def turbo3_numbers(two_bits, one_bit, TILES: tl.constexpr):
    """The numbers of both halves, f16 or f32, from what ``three_bit_bytes`` gives."""
    two_bits, two_shift = _spread(two_bits, 2, TILES)
    one_bit, one_shift = _spread(one_bit, 4, TILES)
    if TILES.is_asm:
        low, high = tl.inline_asm_elementwise(
            _NUMBERS_ASM,
            "=r,=r,=r,=r,r,r,r,r",
            [two_bits, one_bit, two_shift, one_shift],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        code, sign = two_bits >> two_shift, one_bit >> one_shift
        low, high = _turbo3_number(code, sign), _turbo3_number(code >> 4, sign >> 4)
    return low, high


@triton.jit
def _spread(packed, PARTS: tl.constexpr, TILES: tl.constexpr):
    """Bytes [rows, columns], each of which has bits of ``PARTS`` numbers of the lower half, and as
    many of the upper one above them, for each of these; and where its bits begin."""
    ROWS: tl.constexpr = packed.shape[0]
    COLUMNS: tl.constexpr = packed.shape[1]
    shape: tl.constexpr = (ROWS, PARTS, COLUMNS)
    # Threads keep the bytes that they have read, one behind another, through a reshape alone.
    packed = tl.broadcast_to(tl.reshape(packed, [ROWS, 1, COLUMNS]), shape)
    shift = (4 // PARTS * tl.arange(0, PARTS)).to(tl.uint8)
    shift = tl.broadcast_to(shift[None, :, None], shape)
    return tl.reshape(packed, [ROWS, TILES.width]), tl.reshape(shift, [ROWS, TILES.width])


@triton.jit
def _turbo3_number(code, sign):
    size = one_of_4(code, _NUMBERS[0], _NUMBERS[1], _NUMBERS[2], _NUMBERS[3])
    return tl.where((sign & 1) != 0, -size, size)
