"""The formats, a tile at a time: compiled, for a CPU.

A tile is the vectors that can share parameters: one KV head's of a block, of ``int4_block`` all.
Every packing function has the arguments

    x           f32 [vectors, head_dim], which it overwrites
    codes       uint8 [vectors, code bytes of a vector]; of turbo3 a pair of these, its two parts
    parameters  uint16 [f16 parameters of the tile]
    bench       what else it needs

and the unpacking function of its format has the same, and fills ``x``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.cpu_compile import compiled
from coldpage.kernels.cold.cpu_numbers import f16_above, f16_below, f16_nearest, f16_number
from coldpage.kernels.cold.cpu_rows import (
    fp8_codes,
    fp8_numbers,
    int8_codes,
    int8_numbers,
    inverse,
    largest_size,
    levels_of,
    nibbles_of,
    scale_and_add,
    smallest_and_largest,
    subtract_and_scale,
)
from coldpage.kernels.cold.cpu_turbo import (
    hadamard_transform,
    length_squared,
    multiply,
    turbo3_bits,
    turbo3_codes_of,
    turbo3_numbers,
    turbo3_unit,
    turbo4_nibbles,
    turbo4_numbers,
    turbo4_squares,
)
from coldpage.kernels.cold.numbers import F16_MAX, FP8_MAX

__all__ = [
    "Workbench",
    "pack_fp8",
    "pack_int4_block",
    "pack_int4_channel",
    "pack_int4_token",
    "pack_int8",
    "pack_turbo3",
    "pack_turbo4",
    "unpack_fp8",
    "unpack_int4_block",
    "unpack_int4_channel",
    "unpack_int4_token",
    "unpack_int8",
    "unpack_turbo3",
    "unpack_turbo4",
]

_Numbers = npt.NDArray[np.float32]
_Codes = npt.NDArray[np.uint8]
_TwoParts = tuple[_Codes, _Codes]
_Parameters = npt.NDArray[np.uint16]

_F = np.float32
_I = np.int32
_ONE, _ZERO = _F(1), _F(0)
_PER_7, _PER_15, _PER_127, _PER_448 = _F(1 / 7), _F(1 / 15), _F(1 / 127), _F(1 / FP8_MAX)
_F16_MAX = _F(F16_MAX)


class Workbench(NamedTuple):
    """Made once for many tiles."""

    group: int  # numbers, or tokens, that share parameters
    signs: _Numbers  # [group] of rotated formats
    rows: _Numbers  # [2, head_dim], overwritten
    codes: _Codes  # [head_dim], overwritten


@compiled
def _stored(parameter: Any) -> Any:
    """The number of an f16 of either sign, as it is stored."""
    size = f16_number(_I(parameter) & _I(0x7FFF))
    return -size if parameter >= np.uint16(0x8000) else size


@compiled
def pack_int8(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """Whole numbers of a step that each vector has."""
    for v in range(x.shape[0]):
        scale = f16_above(largest_size(x[v]) * _PER_127)
        parameters[v] = np.uint16(scale)
        int8_codes(x[v], inverse(f16_number(scale)), codes[v])


@compiled
def unpack_int8(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """The inverse of ``pack_int8``."""
    for v in range(x.shape[0]):
        int8_numbers(codes[v], _stored(parameters[v]), x[v])


@compiled
def pack_fp8(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """Small floats, in units that each vector has."""
    for v in range(x.shape[0]):
        scale = f16_above(largest_size(x[v]) * _PER_448)
        parameters[v] = np.uint16(scale)
        fp8_codes(x[v], inverse(f16_number(scale)), codes[v])


@compiled
def unpack_fp8(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """The inverse of ``pack_fp8``."""
    for v in range(x.shape[0]):
        fp8_numbers(codes[v], _stored(parameters[v]), x[v])


@compiled
def pack_int4_token(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """Four bits a number, between limits that each group of a vector has."""
    place = 0
    for v in range(x.shape[0]):
        for first in range(0, x.shape[1], bench.group):
            row = x[v, first : first + bench.group]
            smallest, largest = smallest_and_largest(row)
            parameters[place + 1] = np.uint16(f16_below(smallest))
            minimum = _stored(parameters[place + 1])
            scale = f16_above(max(largest - minimum, _ZERO) * _PER_15)
            parameters[place] = np.uint16(scale)
            factor = inverse(f16_number(scale))
            subtract_and_scale(row, minimum, factor)
            place += 2
        nibbles_of(x[v], codes[v])


@compiled
def unpack_int4_token(
    x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench
) -> None:
    """The inverse of ``pack_int4_token``."""
    place = 0
    for v in range(x.shape[0]):
        levels_of(codes[v], x[v])
        for first in range(0, x.shape[1], bench.group):
            scale, minimum = _stored(parameters[place]), _stored(parameters[place + 1])
            scale_and_add(x[v, first : first + bench.group], scale, minimum)
            place += 2


@compiled
def pack_int4_channel(
    x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench
) -> None:
    """Four bits a number, between limits that each channel of a group of tokens has."""
    head_dim = x.shape[1]
    for first in range(0, x.shape[0], bench.group):
        smallest, largest = bench.rows[0], bench.rows[1]
        _limits_of_channels(x[first : first + bench.group], smallest, largest)
        start = first // bench.group * head_dim * 2
        stored = parameters[start : start + head_dim * 2]
        _channel_parameters(smallest, largest, stored)
        for v in range(first, first + bench.group):
            _subtract_and_scale_channels(x[v], smallest, largest)
            nibbles_of(x[v], codes[v])


@compiled
def _limits_of_channels(x: _Numbers, smallest: _Numbers, largest: _Numbers) -> None:
    for i in range(smallest.size):
        smallest[i] = largest[i] = x[0, i]
    for v in range(x.shape[0]):
        row = x[v]
        for i in range(smallest.size):
            smallest[i] = min(smallest[i], row[i])
            largest[i] = max(largest[i], row[i])


@compiled
def _channel_parameters(smallest: _Numbers, largest: _Numbers, parameters: _Parameters) -> None:
    """Store scales and minima, and make of the limits what to subtract and to multiply by."""
    for i in range(smallest.size):
        minimum_bits = f16_below(smallest[i])
        minimum = _stored(np.uint16(minimum_bits))
        scale = f16_above(max(largest[i] - minimum, _ZERO) * _PER_15)
        parameters[2 * i] = np.uint16(scale)
        parameters[2 * i + 1] = np.uint16(minimum_bits)
        smallest[i] = minimum
        largest[i] = inverse(f16_number(scale))


@compiled
def _subtract_and_scale_channels(row: _Numbers, minima: _Numbers, factors: _Numbers) -> None:
    for i in range(row.size):
        row[i] = (row[i] - minima[i]) * factors[i]


@compiled
def _scale_and_add_channels(row: _Numbers, factors: _Numbers, addends: _Numbers) -> None:
    for i in range(row.size):
        row[i] = row[i] * factors[i] + addends[i]


@compiled
def unpack_int4_channel(
    x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench
) -> None:
    """The inverse of ``pack_int4_channel``."""
    head_dim = x.shape[1]
    scales, minima = bench.rows[0], bench.rows[1]
    for first in range(0, x.shape[0], bench.group):
        start = first // bench.group * head_dim * 2
        for i in range(head_dim):
            scales[i] = _stored(parameters[start + 2 * i])
            minima[i] = _stored(parameters[start + 2 * i + 1])
        for v in range(first, first + bench.group):
            levels_of(codes[v], x[v])
            _scale_and_add_channels(x[v], scales, minima)


@compiled
def _rotate(row: _Numbers, bench: Workbench, rotated: _Numbers) -> Any:
    """Fill ``rotated`` with a root mean square of 1, or zeros; returns the row's length squared.
    The row is overwritten."""
    squared = length_squared(row)
    multiply(row, bench.signs, inverse(np.sqrt(squared)))
    hadamard_transform(row, bench.rows[1, : row.size], rotated)
    return squared


@compiled
def _rotate_back(row: _Numbers, norm: Any, bench: Workbench, result: _Numbers) -> None:
    """The row is overwritten."""
    hadamard_transform(row, bench.rows[1, : row.size], result)
    multiply(result, bench.signs, norm * inverse(np.sqrt(_F(row.size))))


@compiled
def _stored_norm(norm: Any) -> Any:
    return np.uint16(f16_nearest(min(norm, _F16_MAX)))


@compiled
def pack_turbo4(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """Rotated, four bits a number."""
    vector, group = bench.rows[0], bench.group
    groups = vector.size // group
    for v in range(x.shape[0]):
        for g in range(groups):
            rotated = vector[g * group : (g + 1) * group]
            squared = _rotate(x[v, g * group : (g + 1) * group], bench, rotated)
            norm = np.sqrt(squared / turbo4_squares(rotated))
            parameters[v * groups + g] = _stored_norm(norm)
        turbo4_nibbles(vector, codes[v])


@compiled
def unpack_turbo4(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """The inverse of ``pack_turbo4``."""
    vector, group = bench.rows[0], bench.group
    groups = vector.size // group
    for v in range(x.shape[0]):
        turbo4_numbers(codes[v], vector)
        for g in range(groups):
            norm = _stored(parameters[v * groups + g])
            rotated, result = vector[g * group : (g + 1) * group], x[v, g * group : (g + 1) * group]
            _rotate_back(rotated, norm, bench, result)


@compiled
def pack_turbo3(x: _Numbers, codes: _TwoParts, parameters: _Parameters, bench: Workbench) -> None:
    """Rotated, three bits a number."""
    vector, group = bench.rows[0], bench.group
    groups = vector.size // group
    for v in range(x.shape[0]):
        for g in range(groups):
            rotated = vector[g * group : (g + 1) * group]
            squared = _rotate(x[v, g * group : (g + 1) * group], bench, rotated)
            own_codes = bench.codes[g * group : (g + 1) * group]
            product = turbo3_codes_of(rotated, turbo3_unit(rotated), own_codes)
            # The product is above 1 but for zeros: no number stands for less than 0.24.
            norm = np.sqrt(squared) * np.sqrt(_F(group)) / max(product, _ONE)
            parameters[v * groups + g] = _stored_norm(norm)
        turbo3_bits(bench.codes, codes[0][v], codes[1][v])


@compiled
def unpack_turbo3(x: _Numbers, codes: _TwoParts, parameters: _Parameters, bench: Workbench) -> None:
    """The inverse of ``pack_turbo3``."""
    vector, group = bench.rows[0], bench.group
    groups = vector.size // group
    for v in range(x.shape[0]):
        turbo3_numbers(codes[0][v], codes[1][v], vector)
        for g in range(groups):
            norm = _stored(parameters[v * groups + g])
            rotated, result = vector[g * group : (g + 1) * group], x[v, g * group : (g + 1) * group]
            _rotate_back(rotated, norm, bench, result)


@compiled
def pack_int4_block(x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench) -> None:
    """Four bits a number of a step that the whole buffer has."""
    largest = _ZERO
    for v in range(x.shape[0]):
        largest = max(largest, largest_size(x[v]))
    scale = _F(largest * _PER_7)
    bits = scale.view(np.int32)
    parameters[0] = np.uint16(bits)
    parameters[1] = np.uint16(bits >> _I(16))
    factor = inverse(scale)
    for v in range(x.shape[0]):
        scale_and_add(x[v], factor, _F(8))
        nibbles_of(x[v], codes[v])


@compiled
def unpack_int4_block(
    x: _Numbers, codes: _Codes, parameters: _Parameters, bench: Workbench
) -> None:
    """The inverse of ``pack_int4_block``."""
    scale = _I(_I(parameters[0]) | _I(_I(parameters[1]) << _I(16))).view(np.float32)
    for v in range(x.shape[0]):
        levels_of(codes[v], x[v])
        scale_and_add(x[v], scale, _F(-8) * scale)
