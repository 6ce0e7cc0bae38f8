"""What kernels share of packing: how they cut vectors, and a tile's numbers to stored numbers.

The same numbers as ``packing`` gives, turbo4 up to the rounding of its sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from coldpage.kernels.kv_types import Q8_0, TURBO4, KVType
from coldpage.kernels.packing import F16_MAX, PER_127
from coldpage.kernels.rotation import CODEBOOK, THRESHOLDS

__all__ = [
    "IS_PLAIN",
    "IS_Q8_0",
    "IS_TURBO4",
    "Chunks",
    "chunks_of",
    "pack_q8_tile",
    "pack_turbo4_tile",
]

# What a kernel does with a chunk, for all the plain types alike.
IS_PLAIN = tl.constexpr(0)
IS_Q8_0 = tl.constexpr(1)
IS_TURBO4 = tl.constexpr(2)

_F16_MAX = tl.constexpr(F16_MAX)
_PER_127 = tl.constexpr(PER_127)
_SQUARES = tl.constexpr(tuple(c * c for c in CODEBOOK[:8]))
_THRESHOLDS = tl.constexpr(THRESHOLDS)


class Chunks(NamedTuple):
    """How kernels cut the vectors of K or V: into parts, see ``kv_types``."""

    kind: int  # IS_PLAIN and so on
    numbers: int  # of a chunk
    width: int  # the same, up to a power of two
    per_vector: int
    num_heads: int


@lru_cache(maxsize=64)
def chunks_of(kv_type: KVType, num_heads: int, head_dim: int) -> Chunks:
    """The chunks of vectors of this type and size."""
    numbers = kv_type.group(head_dim) or head_dim
    kind = {Q8_0: IS_Q8_0, TURBO4: IS_TURBO4}.get(kv_type, IS_PLAIN).value
    width = triton.next_power_of_2(numbers)
    return Chunks(kind, numbers, width, head_dim // numbers, num_heads)


@triton.jit
def pack_q8_tile(numbers):  # type: ignore[no-untyped-def]
    """Numbers f32 [rows, 32] as int8 [rows, 32] and scales f16 [rows]. A kernel that uses it must
    be compiled without fused multiply-adds, which would round once less than the reference."""
    wanted = tl.minimum(tl.max(tl.abs(numbers), 1) * _PER_127, _F16_MAX)
    scale = wanted.to(tl.float16)
    too_small = (scale.to(tl.float32) < wanted).to(tl.int16)
    scale = (scale.to(tl.int16, bitcast=True) + too_small).to(tl.float16, bitcast=True)
    wide_scale = scale.to(tl.float32)
    inverse = tl.div_rn(1.0, tl.where(wide_scale > 0, wide_scale, 1.0))
    quotients = tl.minimum(tl.maximum(numbers * inverse[:, None], -127.0), 127.0)
    # Adding 1.5 * 2^23 leaves no bits below one, and rounds half to even.
    return ((quotients + 12582912.0) - 12582912.0).to(tl.int8), scale


@triton.jit
def pack_turbo4_tile(low, high):  # type: ignore[no-untyped-def]
    """The two halves of rotated groups, times sqrt(group), f32 [rows, group / 2], as bytes of the
    same shape and norms f16 [rows]."""
    root: tl.constexpr = (2 * low.shape[1]) ** 0.5
    length = tl.sqrt_rn(tl.sum(low * low + high * high, 1))
    inverse = tl.div_rn(root, tl.where(length > 0, length, 1.0))
    low_index, low_square = _nearest(low * inverse[:, None])
    high_index, high_square = _nearest(high * inverse[:, None])
    code_length = tl.sqrt_rn(tl.sum(low_square + high_square, 1))
    norm = tl.minimum(tl.div_rn(length, code_length * root), _F16_MAX).to(tl.float16)
    return (low_index | (high_index << 4)).to(tl.uint8), norm


@triton.jit
def _nearest(numbers):  # type: ignore[no-untyped-def]
    """The indices of what in the codebook is nearest, int32, and its squares, f32: three
    comparisons, each with a threshold that depends on those before."""
    size = tl.abs(numbers)
    is_4 = size > _THRESHOLDS[3]
    is_2 = size > tl.where(is_4, _THRESHOLDS[5], _THRESHOLDS[1])
    if_2 = tl.where(is_4, _THRESHOLDS[6], _THRESHOLDS[2])
    is_1 = size > tl.where(is_2, if_2, tl.where(is_4, _THRESHOLDS[4], _THRESHOLDS[0]))
    index = is_4.to(tl.int32) * 4 + is_2.to(tl.int32) * 2 + is_1.to(tl.int32)
    index += (numbers < 0).to(tl.int32) * 8
    low = tl.where(is_1, _SQUARES[1], _SQUARES[0])
    low = tl.where(is_2, tl.where(is_1, _SQUARES[3], _SQUARES[2]), low)
    high = tl.where(is_1, _SQUARES[5], _SQUARES[4])
    high = tl.where(is_2, tl.where(is_1, _SQUARES[7], _SQUARES[6]), high)
    return index, tl.where(is_4, high, low)
