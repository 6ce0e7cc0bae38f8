"""The numbers that every implementation of the packed formats shares: codebooks, signs, limits.

numpy alone, so that the CPU's and the GPU's kernels and the reference build on the same ones. They
are part of what packed pages mean, so that a change of one raises ``NUMBERS_VERSION``; but for
``TURBO3_STEP``, which only who packs has to know.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.formats import ColdFormat

__all__ = [
    "F16_MAX",
    "FP8_MAX",
    "LARGEST_HOT",
    "MAGNITUDES",
    "NUMBERS_VERSION",
    "RADIANS_PER_STEP",
    "THRESHOLDS",
    "TURBO3_STEP",
    "hadamard",
    "phase_steps",
    "signs",
]

_FloatArray = npt.NDArray[np.float32]

NUMBERS_VERSION: Final = 2
"""Part of a codec's identity: another one where the same bytes mean something else, be it by these
numbers or by where ``formats`` has them lie. Pages of other versions are not read."""

F16_MAX: Final = 65504.0
FP8_MAX: Final = 448.0
"""The largest e4m3 number (of the kind without infinities)."""

LARGEST_HOT: Final = 2.0**60
"""Hot numbers beyond count as 0, as NaN and infinity do: no sum of squares is infinite then."""

RADIANS_PER_STEP: Final = 2.0 * np.pi / 2.0**32
"""Phases are whole steps of this size."""

# The best 16 and 8 numbers for N(0, 1) under squared error (Lloyd and Max): their upper halves.
MAGNITUDES: Final = {
    ColdFormat.TURBO4: (
        0.128395,
        0.388048,
        0.656759,
        0.942340,
        1.256231,
        1.618046,
        2.069017,
        2.732590,
    ),
    ColdFormat.TURBO3: (0.245094, 0.756005, 1.343909, 2.151946),
}
"""What the magnitude bits of a rotated number's code stand for; the bit above them is its sign."""

THRESHOLDS: Final = {
    cold_format: tuple((low + high) / 2 for low, high in pairwise(magnitudes))
    for cold_format, magnitudes in MAGNITUDES.items()
}
"""A number's magnitude code is how many of these its magnitude is above."""

TURBO3_STEP: Final = 3.0
"""Codes of turbo3 are taken twice: in units of the group's root mean square, and in units moved
from it towards the scale that suits those codes best (least squares), this many times as far.

Going just there, again and again, ends where the error is least, but covers a sixth of the way each
time. For groups of 64 and 128 normal numbers 3 is best: the error's square is 0.05 and 0.03 smaller
then, which going there twice does not reach. Whatever the numbers are, that scale is at least 0.77
of the root mean square, so the one that is stepped to is positive."""

# Hot pages of the type turbo4 have these signs too (``kernels.rotation``). Part of the stored
# format: with others, pages written before read as noise.
_SIGNS_SEED: Final = b"coldpage turbo4 signs"


@lru_cache(maxsize=8)
def signs(group: int) -> _FloatArray:
    """The fixed signs of a group's numbers, +-1.0 f32 [group], not to be written to."""
    digest = np.frombuffer(hashlib.sha256(_SIGNS_SEED).digest(), np.uint8)
    assert 0 < group <= digest.size * 8
    result = np.float32(1.0) - np.float32(2.0) * np.unpackbits(digest)[:group]
    result.setflags(write=False)
    return result


@lru_cache(maxsize=8)
def hadamard(group: int) -> _FloatArray:
    """Sylvester's matrix, +-1.0 f32 [group, group], not to be written to. It is symmetric, and its
    product with itself is ``group`` times the identity."""
    assert group > 0 and group & (group - 1) == 0
    result = np.ones((1, 1), np.float32)
    while result.shape[0] < group:
        result = np.block([[result, result], [result, -result]])
    result.setflags(write=False)
    return result


def phase_steps(
    frequencies: npt.NDArray[np.uint32], block_ordinal: int, tokens_per_block: int
) -> npt.NDArray[np.uint32]:
    """How far the planes of a block's keys are turned, in ``RADIANS_PER_STEP``, uint32
    [tokens_per_block, head_dim / 2], from frequencies [head_dim / 2]. Pure."""
    positions = np.arange(tokens_per_block, dtype=np.uint64) + np.uint64(
        block_ordinal * tokens_per_block
    )
    products = positions[:, None] * frequencies.astype(np.uint64)
    return (products & np.uint64(0xFFFFFFFF)).astype(np.uint32)
