"""The packed formats in plain numpy, one buffer at a time: what tests hold the fast ones against.

Arithmetic is in f64, parameters are rounded to what is stored. A hot number that is NaN or beyond
2**60 counts as 0.

Rotations keep lengths and products. With x a rotated group and c what its codes stand for, the norm
of turbo3 is x.x / x.c: a group as it comes back has with itself as it was the product x.x, so that
what attention makes of it is on average neither too large nor too small. The norm of turbo4 is the
length of x over that of c, since x.c would take a fifteenth off its divergence, but takes a GPU,
which looks up squares of numbers by whole registers, more instructions than it has to spare. Either
is about the root mean square of the group.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.formats import ColdFormat, KVShape
from coldpage.kernels.cold.numbers import (
    F16_MAX,
    FP8_MAX,
    LARGEST_HOT,
    MAGNITUDES,
    RADIANS_PER_STEP,
    THRESHOLDS,
    TURBO3_STEP,
    hadamard,
    phase_steps,
    signs,
)

__all__ = ["pack_buffer", "unpack_buffer"]

_Floats = npt.NDArray[np.float64]
_Halves = npt.NDArray[np.float16]
_Bytes = npt.NDArray[np.uint8]
_Codes = npt.NDArray[np.int64]


def pack_buffer(
    x: npt.NDArray[np.float32],
    cold_format: ColdFormat,
    shape: KVShape,
    *,
    frequencies: npt.NDArray[np.uint32] | None = None,
    means: npt.NDArray[np.float32] | None = None,
    block_ordinal: int = 0,
) -> _Bytes:
    """Hot numbers [kv_heads, tokens_per_block, head_dim] as a packed buffer, uint8 [buffer_bytes].

    ``frequencies`` are the buffer's [head_dim / 2], ``means`` [kv_heads, head_dim]. Pure.
    """
    numbers = np.where(np.abs(x) <= LARGEST_HOT, x, 0.0).astype(np.float64)
    if frequencies is not None:
        numbers = _turned(numbers, -_phases(frequencies, block_ordinal, shape))
    if means is not None:
        numbers = numbers - means[:, None].astype(np.float64)
    codes, parameters = _PACKS[cold_format](numbers, cold_format, shape)
    packed = np.zeros(cold_format.buffer_bytes(shape), np.uint8)
    code_bytes = cold_format.code_bytes(shape)
    packed[:code_bytes] = codes.reshape(-1)
    raw = np.ascontiguousarray(parameters).reshape(-1).view(np.uint8)
    packed[code_bytes : code_bytes + raw.size] = raw
    return packed


def unpack_buffer(
    packed: _Bytes,
    cold_format: ColdFormat,
    shape: KVShape,
    *,
    frequencies: npt.NDArray[np.uint32] | None = None,
    means: npt.NDArray[np.float32] | None = None,
    block_ordinal: int = 0,
) -> npt.NDArray[np.float32]:
    """The inverse: numbers f32 [kv_heads, tokens_per_block, head_dim], not rounded to the type of
    hot pages. Pure."""
    heads, tokens, _, _ = shape
    split = cold_format.code_bytes(shape)
    codes = packed[:split].reshape(heads, tokens, -1)  # of turbo3 in two parts, see below
    parameters = packed[split : split + 2 * cold_format.num_parameters(shape)].copy()
    numbers = _UNPACKS[cold_format](codes, parameters.view(np.float16), cold_format, shape)
    if means is not None:
        numbers = numbers + means[:, None].astype(np.float64)
    if frequencies is not None:
        numbers = _turned(numbers, _phases(frequencies, block_ordinal, shape))
    return numbers.astype(np.float32)


def _phases(frequencies: npt.NDArray[np.uint32], block_ordinal: int, shape: KVShape) -> _Floats:
    steps = phase_steps(frequencies, block_ordinal, shape.tokens_per_block)
    return steps.astype(np.float64) * RADIANS_PER_STEP


def _turned(numbers: _Floats, phases: _Floats) -> _Floats:
    low, high = np.split(numbers, 2, axis=-1)
    cosines, sines = np.cos(phases), np.sin(phases)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


def _rounded_up(wanted: _Floats) -> _Halves:
    """The smallest f16 that is no smaller, or the largest one there is."""
    wanted = np.clip(wanted, -F16_MAX, F16_MAX)
    nearest = wanted.astype(np.float16)
    with np.errstate(over="ignore"):  # above the largest, which is not taken
        above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest < wanted, above, nearest)


def _quotients(numbers: _Floats, scale: npt.NDArray[np.floating]) -> _Floats:
    """``numbers / scale``, and 0 where the scale is."""
    wide = scale.astype(np.float64)
    return np.divide(numbers, wide, out=np.zeros_like(numbers), where=wide > 0)


def _pack_int8(numbers: _Floats, _: ColdFormat, __: KVShape) -> tuple[_Bytes, _Halves]:
    scale = _rounded_up(np.abs(numbers).max(-1) / 127)
    codes = np.clip(np.rint(_quotients(numbers, scale[..., None])), -127, 127)
    return codes.astype(np.int8).view(np.uint8), scale


def _unpack_int8(codes: _Bytes, scale: _Halves, _: ColdFormat, __: KVShape) -> _Floats:
    return codes.view(np.int8) * scale.astype(np.float64).reshape(*codes.shape[:2], 1)


def _pack_fp8(numbers: _Floats, _: ColdFormat, __: KVShape) -> tuple[_Bytes, _Halves]:
    scale = _rounded_up(np.abs(numbers).max(-1) / FP8_MAX)
    quotients = np.clip(_quotients(numbers, scale[..., None]), -FP8_MAX, FP8_MAX)
    magnitudes = np.abs(quotients)
    between = (_E4M3[:-1] + _E4M3[1:]) / 2
    codes = np.searchsorted(between, magnitudes)  # in the middle of two: the lower one
    is_tie = np.isin(magnitudes, between)
    codes += is_tie & (codes % 2 == 1)
    return (codes + 128 * np.signbit(quotients)).astype(np.uint8), scale


def _unpack_fp8(codes: _Bytes, scale: _Halves, _: ColdFormat, __: KVShape) -> _Floats:
    sign = np.where(codes & 128, -1.0, 1.0)
    wide = scale.astype(np.float64).reshape(*codes.shape[:2], 1)
    return np.asarray(sign * _E4M3[codes & 127] * wide, np.float64)


def _e4m3_numbers() -> _Floats:
    """The numbers of codes 0 to 126; 127 is NaN, which is never written."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    small = fraction / 8 * 2.0**-6
    return np.where(exponent == 0, small, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))


_E4M3: Final = _e4m3_numbers()


def _grouped(numbers: _Floats, cold_format: ColdFormat, shape: KVShape) -> tuple[_Floats, int]:
    """The numbers with their groups apart, and the axis along which a group lies: one of 3 for
    groups of a vector, one of 2 for groups of tokens."""
    heads, tokens, head_dim, _ = shape
    group = cold_format.group(shape)
    if cold_format is ColdFormat.INT4_CHANNEL:
        return numbers.reshape(heads, tokens // group, group, head_dim), 2
    return numbers.reshape(heads, tokens, head_dim // group, group), 3


def _pack_int4(numbers: _Floats, cold_format: ColdFormat, shape: KVShape) -> tuple[_Bytes, _Halves]:
    grouped, axis = _grouped(numbers, cold_format, shape)
    minimum = np.float16(0) - _rounded_up(-grouped.min(axis))
    above = grouped - np.expand_dims(minimum.astype(np.float64), axis)
    scale = _rounded_up(np.maximum(above.max(axis), 0) / 15)  # all may be below the least f16
    codes = np.clip(np.rint(_quotients(above, np.expand_dims(scale, axis))), 0, 15)
    parameters = np.stack([scale, minimum], -1)
    return _nibbles(codes.reshape(numbers.shape)), parameters


def _unpack_int4(
    codes: _Bytes, parameters: _Halves, cold_format: ColdFormat, shape: KVShape
) -> _Floats:
    grouped, axis = _grouped(_from_nibbles(codes), cold_format, shape)
    removed = tuple(n for i, n in enumerate(grouped.shape) if i != axis)
    pairs = np.expand_dims(parameters.astype(np.float64).reshape(*removed, 2), axis)
    numbers = grouped * pairs[..., 0] + pairs[..., 1]
    return numbers.reshape(*codes.shape[:2], -1)


def _pack_turbo(
    numbers: _Floats, cold_format: ColdFormat, shape: KVShape
) -> tuple[_Bytes, _Halves]:
    grouped, _ = _grouped(numbers, cold_format, shape)
    group = grouped.shape[-1]
    rotated = (grouped * signs(group)) @ hadamard(group).astype(np.float64) / np.sqrt(group)
    sizes = np.abs(rotated)
    squares = np.square(grouped).sum(-1, keepdims=True)
    magnitude = _magnitude_codes(sizes, np.sqrt(squares / group), cold_format)
    if cold_format is ColdFormat.TURBO3:
        magnitude, norm = _turbo3_codes_and_norm(sizes, squares, magnitude)
    else:
        chosen = _codebook(cold_format)[magnitude]
        norm = np.sqrt(squares / np.square(chosen).sum(-1, keepdims=True))
    codes = (magnitude + len(MAGNITUDES[cold_format]) * (rotated < 0)).reshape(numbers.shape)
    pack = _nibbles if cold_format is ColdFormat.TURBO4 else _three_bits
    return pack(codes), np.minimum(norm, F16_MAX).astype(np.float16)


def _magnitude_codes(sizes: _Floats, unit: _Floats, cold_format: ColdFormat) -> _Codes:
    return np.searchsorted(THRESHOLDS[cold_format], _quotients(sizes, unit))


def _turbo3_codes_and_norm(
    sizes: _Floats, squares: _Floats, magnitude: _Codes
) -> tuple[_Codes, _Floats]:
    """From the codes that are nearest in units of the root mean square."""
    unit = np.sqrt(squares / sizes.shape[-1])
    chosen = _codebook(ColdFormat.TURBO3)[magnitude]
    best = (sizes * chosen).sum(-1, keepdims=True) / np.square(chosen).sum(-1, keepdims=True)
    magnitude = _magnitude_codes(sizes, unit + TURBO3_STEP * (best - unit), ColdFormat.TURBO3)
    chosen = _codebook(ColdFormat.TURBO3)[magnitude]
    return magnitude, _quotients(squares, (sizes * chosen).sum(-1, keepdims=True))


def _unpack_turbo(codes: _Bytes, norm: _Halves, cold_format: ColdFormat, shape: KVShape) -> _Floats:
    is_turbo4 = cold_format is ColdFormat.TURBO4
    indices = _from_nibbles(codes) if is_turbo4 else _from_three_bits(codes, shape)
    grouped, _ = _grouped(_codebook(cold_format)[indices.astype(np.int64)], cold_format, shape)
    group = grouped.shape[-1]
    grouped = grouped * norm.astype(np.float64).reshape(*grouped.shape[:3], 1)
    back: _Floats = grouped @ hadamard(group).astype(np.float64) * signs(group) / np.sqrt(group)
    return back.reshape(*codes.shape[:2], -1)


def _codebook(cold_format: ColdFormat) -> _Floats:
    magnitudes = np.array(MAGNITUDES[cold_format])
    return np.concatenate([magnitudes, -magnitudes])


def _pack_block(numbers: _Floats, _: ColdFormat, __: KVShape) -> tuple[_Bytes, _Halves]:
    scale = np.array([np.abs(numbers).max() / 7], np.float32)
    codes = np.clip(np.rint(_quotients(numbers, scale)), -7, 7)
    return _nibbles(codes + 8), scale.view(np.float16)


def _unpack_block(codes: _Bytes, scale: _Halves, _: ColdFormat, __: KVShape) -> _Floats:
    return np.multiply(_from_nibbles(codes) - 8, scale.view(np.float32).astype(np.float64))


def _nibbles(codes: npt.NDArray[np.number]) -> _Bytes:
    low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
    return low | high * np.uint8(16)


def _from_nibbles(codes: _Bytes) -> _Floats:
    return np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float64)


def _three_bits(codes: npt.NDArray[np.integer]) -> _Bytes:
    """All low bits, then all high ones."""
    quarters = np.split(codes.astype(np.uint8) & 3, 4, axis=-1)
    eighths = np.split(codes.astype(np.uint8) >> 2, 8, axis=-1)
    low = np.bitwise_or.reduce([quarter << (2 * j) for j, quarter in enumerate(quarters)])
    high = np.bitwise_or.reduce([eighth << j for j, eighth in enumerate(eighths)])
    return np.concatenate([low, high], axis=None)


def _from_three_bits(codes: _Bytes, shape: KVShape) -> _Floats:
    parts = np.split(codes.reshape(-1), [shape.num_numbers // 4])
    low, high = (part.reshape(*shape[:2], -1) for part in parts)
    low = np.concatenate([low >> (2 * j) & 3 for j in range(4)], axis=-1)
    high = np.concatenate([high >> j & 1 for j in range(8)], axis=-1)
    return (low | high << 2).astype(np.float64)


_PACKS: Final = {
    ColdFormat.INT8: _pack_int8,
    ColdFormat.FP8: _pack_fp8,
    ColdFormat.INT4_TOKEN: _pack_int4,
    ColdFormat.INT4_CHANNEL: _pack_int4,
    ColdFormat.TURBO4: _pack_turbo,
    ColdFormat.TURBO3: _pack_turbo,
    ColdFormat.INT4_BLOCK: _pack_block,
}
_UNPACKS: Final = {
    ColdFormat.INT8: _unpack_int8,
    ColdFormat.FP8: _unpack_fp8,
    ColdFormat.INT4_TOKEN: _unpack_int4,
    ColdFormat.INT4_CHANNEL: _unpack_int4,
    ColdFormat.TURBO4: _unpack_turbo,
    ColdFormat.TURBO3: _unpack_turbo,
    ColdFormat.INT4_BLOCK: _unpack_block,
}
