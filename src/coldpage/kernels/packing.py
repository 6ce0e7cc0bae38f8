"""Numbers to stored numbers and back: the plain reference, and the parts that kernels share.

Plain types are a conversion. ``q8_0`` takes the largest of 32 magnitudes / 127, rounded up to f16,
as the scale, so that no quotient passes 127, and rounds quotients half to even. ``turbo4`` takes
the codebook value nearest to each number of the rotated group, relative to the group's root mean
square, and a norm (f16) for which ``norm * codebook[index]`` is as long as the group was.

``unpack`` and ``gather_pages`` read with the codebook in f32. ``decode_attention`` has it in bf16
on a GPU: each of its numbers is 2^-9 of itself off or so (2^-8 at most), a fiftieth of what a
number is off that was stored as one of them.

The functions with ``_tile`` in their name are Triton's: they work on tiles in a kernel, and give
the same numbers as the reference (turbo4 up to the rounding of its sums).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from coldpage.kernels.kv_types import Q8_0, TURBO4, KVType
from coldpage.kernels.rotation import CODEBOOK, THRESHOLDS, codebook, rotation

__all__ = [
    "IS_PLAIN",
    "IS_Q8_0",
    "IS_TURBO4",
    "Chunks",
    "chunks_of",
    "pack",
    "pack_q8_tile",
    "pack_turbo4_tile",
    "unpack",
]

# What a kernel does with a chunk, for all the plain types alike.
IS_PLAIN = tl.constexpr(0)
IS_Q8_0 = tl.constexpr(1)
IS_TURBO4 = tl.constexpr(2)

_F16_MAX = tl.constexpr(65504.0)
# Of a rounded product, where a quotient would be: one instruction, and the same on every device.
_PER_127 = tl.constexpr(1 / 127)
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


def pack(x: torch.Tensor, kv_type: KVType) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Vectors [..., head_dim], not yet rotated, as ``kv_type`` stores them: values [...,
    num_values] of its dtype, part by part, and scales f16 [..., num_scales] of the types with
    them. Pure.
    """
    assert kv_type.supports(x.shape[-1])
    group = kv_type.group(x.shape[-1])
    if group is None:
        return x.to(kv_type.value_dtype), None
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)
    values, scales = _PACKS[kv_type](groups)
    return values.flatten(-2), scales


def unpack(
    values: torch.Tensor, scales: torch.Tensor | None, kv_type: KVType, dtype: torch.dtype
) -> torch.Tensor:
    """What ``pack`` stored, as vectors [..., head_dim] in ``dtype``. In stored space: rotated types
    come back rotated. Pure.
    """
    if scales is None:
        return values.to(dtype)
    groups = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    numbers = _UNPACKS[kv_type](groups) * scales.float()[..., None]
    return numbers.flatten(-2).to(dtype)


def _pack_q8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (groups.abs().amax(-1) * _PER_127.value).clamp(max=_F16_MAX.value)
    scale = wanted.to(torch.float16)
    too_small = scale.float() < wanted
    scale = (scale.view(torch.int16) + too_small.to(torch.int16)).view(torch.float16)
    inverse = 1.0 / torch.where(scale > 0, scale.float(), 1.0)
    quotients = (groups * inverse[..., None]).clamp(-127.0, 127.0)
    return quotients.round().to(torch.int8), scale


def _unpack_q8(values: torch.Tensor) -> torch.Tensor:
    return values.float()


def _pack_turbo4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = groups.shape[-1]
    # sqrt(group) times the rotated numbers, which leaves the choice of indices as it is.
    rotated = groups @ rotation(group, groups.device, torch.float32)
    length = (rotated * rotated).sum(-1).sqrt()
    inverse = group**0.5 / torch.where(length > 0, length, 1.0)
    numbers = rotated * inverse[..., None]
    thresholds = torch.tensor(THRESHOLDS, device=groups.device)
    index = torch.bucketize(numbers.abs(), thresholds) | ((numbers < 0).long() << 3)
    code_length = codebook(groups.device)[index].square().sum(-1).sqrt()
    norm = (length / (code_length * group**0.5)).clamp(max=_F16_MAX.value).to(torch.float16)
    low, high = index.to(torch.uint8).chunk(2, -1)
    return low | (high << 4), norm


def _unpack_turbo4(values: torch.Tensor) -> torch.Tensor:
    index = torch.cat([values & 15, values >> 4], -1)
    return codebook(values.device)[index.long()]


_PACKS: Final = {Q8_0: _pack_q8, TURBO4: _pack_turbo4}
_UNPACKS: Final = {Q8_0: _unpack_q8, TURBO4: _unpack_turbo4}


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
