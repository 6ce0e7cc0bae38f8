"""Numbers to codes and parameters and back, for the formats that do not rotate.

Tiles are halves [rows, width] as in ``gpu_vectors``; codes are int32 of which the low bits count.
A scale and a minimum make one word of 32 bits, the scale in its low half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

from coldpage.kernels.cold.gpu_vectors import IS_FP8
from coldpage.kernels.cold.numbers import F16_MAX, FP8_MAX

__all__ = [
    "F16_LIMIT",
    "int4_codes",
    "int4_parameters",
    "int4_word",
    "largest",
    "nibble_bytes",
    "nibble_numbers",
    "nibble_offset",
    "scaled_codes",
    "scaled_numbers",
    "whole_numbers",
    "word_halves",
]

F16_LIMIT = tl.constexpr(F16_MAX)
_PER_127 = tl.constexpr(1 / 127)
_PER_FP8_MAX = tl.constexpr(1 / FP8_MAX)
_FP8_MAX = tl.constexpr(FP8_MAX)
# Added to a number below 2^22 this leaves no bits below one, and rounds half to even: the low bits
# of the sum are those of the whole number.
_WHOLE = tl.constexpr(1.5 * 2.0**23)
_BYTE_OFFSET = tl.constexpr(2.0**15 + 128.0)
# Exponents of e4m3 count from -7, those of f32 from -127.
_FP8_DOWN = tl.constexpr(2.0**-120)
_FP8_UP = tl.constexpr(2.0**120)


@triton.jit
def word_halves(word):
    """Two f16 numbers of a word, as f32."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def largest(low, high):
    """Of each row's magnitudes."""
    return tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)


@triton.jit
def scaled_codes(low, high, TILES: tl.constexpr):
    """Codes of 8 bits, for f32 halves, and scales f16 [rows, 1]."""
    if TILES.kind == IS_FP8:
        scale = _rounded_up(largest(low, high) * _PER_FP8_MAX)[:, None]
        inverse = _inverse_of(scale)
        low = _fp8_codes(low * inverse, TILES.is_asm)
        high = _fp8_codes(high * inverse, TILES.is_asm)
    else:
        scale = _rounded_up(largest(low, high) * _PER_127)[:, None]
        inverse = _inverse_of(scale)
        low = whole_numbers(_limited(low, inverse, 127.0))
        high = whole_numbers(_limited(high, inverse, 127.0))
    return low, high, scale


@triton.jit
def scaled_numbers(codes, scale, TILES: tl.constexpr):
    """The same backwards: codes uint8 and scale f32 [rows, 1] to f32."""
    if TILES.kind == IS_FP8:
        numbers = _fp8_numbers(codes, TILES.is_asm) * scale
    elif TILES.is_asm:
        numbers = _offset_bytes(codes) * scale - _BYTE_OFFSET * scale  # which is no rounded number
    else:
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32) * scale
    return numbers


@triton.jit
def _offset_bytes(codes):
    """int8 with _BYTE_OFFSET added, f32: as its middle bits a byte that is not signed is 2^15 more.
    To convert a whole number takes as long as eight such instructions."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w;
        xor.b32 w, $4, 0x80808080;
        prmt.b32 $0, w, 0x47000000, 0x7404;
        prmt.b32 $1, w, 0x47000000, 0x7414;
        prmt.b32 $2, w, 0x47000000, 0x7424;
        prmt.b32 $3, w, 0x47000000, 0x7434;
        }""",
        "=r,=r,=r,=r,r",
        [codes],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def nibble_bytes(low, high):
    """Codes of 4 bits, two in a byte."""
    return ((low & 15) | (high << 4)).to(tl.uint8)


@triton.jit
def nibble_numbers(packed, IS_ASM: tl.constexpr):
    """The low and the high halves of bytes, f32, with ``nibble_offset`` added: as higher bits of a
    mantissa they are 2^7 more."""
    if IS_ASM:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h;
            and.b32 l, $8, 0x0F0F0F0F;
            shr.u32 h, $8, 4;
            and.b32 h, h, 0x0F0F0F0F;
            prmt.b32 $0, l, 0x43000000, 0x7044;
            prmt.b32 $1, l, 0x43000000, 0x7144;
            prmt.b32 $2, l, 0x43000000, 0x7244;
            prmt.b32 $3, l, 0x43000000, 0x7344;
            prmt.b32 $4, h, 0x43000000, 0x7044;
            prmt.b32 $5, h, 0x43000000, 0x7144;
            prmt.b32 $6, h, 0x43000000, 0x7244;
            prmt.b32 $7, h, 0x43000000, 0x7344;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
    return low, high


@triton.jit
def nibble_offset(IS_ASM: tl.constexpr):
    """What ``nibble_numbers`` adds."""
    return 128.0 if IS_ASM else 0.0


@triton.jit
def _limited(numbers, factor, MOST: tl.constexpr):
    """Products from -MOST to MOST, which f16's largest scale may be too small for."""
    return tl.minimum(tl.maximum(numbers * factor, -MOST), MOST)


@triton.jit
def whole_numbers(numbers):
    """The nearest whole numbers to some below 2^22, half to even."""
    return (numbers + _WHOLE).to(tl.int32, bitcast=True)


@triton.jit
def _has_fp8(IS_ASM: tl.constexpr):
    """Whether the GPU has instructions for e4m3."""
    return target_info.cuda_capability_geq(8, 9) if IS_ASM else False


@triton.jit
def _fp8_codes(quotient, IS_ASM: tl.constexpr):
    """Half to even."""
    limited = tl.minimum(tl.maximum(quotient, -_FP8_MAX), _FP8_MAX)
    if _has_fp8(IS_ASM):
        result = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # By carrying into what is kept of f32's bits. What is small in e4m3 is small in f32 too,
        # once it is made 2^120 times smaller.
        bits = (limited * _FP8_DOWN).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        magnitude = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        result = (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)
    return result


@triton.jit
def _fp8_numbers(codes, IS_ASM: tl.constexpr):
    if _has_fp8(IS_ASM):
        result = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = codes.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        result = bits.to(tl.float32, bitcast=True) * _FP8_UP
    return result


@triton.jit
def int4_parameters(least, most):
    """For numbers between two limits the scale and the minimum, f16, and the inverse of the
    scale."""
    minimum = _rounded_down(least)
    # Where all are below f16's least number, none is above it.
    above = tl.maximum(most - minimum.to(tl.float32), 0.0)
    scale = _rounded_up(above * (1 / 15))
    return scale, minimum, _inverse_of(scale)


@triton.jit
def int4_codes(numbers, inverse, minimum, IS_ASM: tl.constexpr):
    """Codes from 0 to 15, by the inverse of the scale and the minimum, both f32."""
    unit = inverse * (1 / 16)
    if IS_ASM:
        part = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;",  # from 0 to 1
            "=f,f,f,f",
            [numbers, unit, -minimum * unit],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        part = tl.maximum(numbers * unit - minimum * unit, 0.0)
    return whole_numbers(tl.minimum(part, 15 / 16) * 16.0)


@triton.jit
def int4_word(scale, minimum):
    """Both in one word, int32."""
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (minimum.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _rounded_up(wanted):
    """The smallest f16 that is no smaller than ``wanted`` >= 0, or the largest one there is."""
    wanted = tl.minimum(wanted, F16_LIMIT)
    nearest = wanted.to(tl.float16)
    too_small = (nearest.to(tl.float32) < wanted).to(tl.int16)
    return (nearest.to(tl.int16, bitcast=True) + too_small).to(tl.float16, bitcast=True)


@triton.jit
def _rounded_down(wanted):
    """The same on the other side, of any sign."""
    wanted = tl.minimum(tl.maximum(wanted, -F16_LIMIT), F16_LIMIT)
    nearest = wanted.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True).to(tl.int32)
    # Further from 0 if negative, as what is rounded up to -0 is too.
    below = bits - ((bits >> 15) | 1)
    bits = tl.where(nearest.to(tl.float32) > wanted, below, bits)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _inverse_of(scale):
    """Nearly: a division takes ten instructions. Where the scale is 0, so are the numbers."""
    wide = scale.to(tl.float32)
    root = tl.rsqrt(tl.where(wide > 0, wide, 1.0))
    return root * root
