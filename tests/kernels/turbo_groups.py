"""The groups of packed pages that turbo formats rotate: as they were, and as they come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.kernels.cold.formats import ColdFormat, KVShape
from coldpage.kernels.cold.numbers import RADIANS_PER_STEP, phase_steps
from coldpage.kernels.cold.reference import unpack_buffer

_Floats = npt.NDArray[np.float64]

F16_ROUNDING = 2.0**-11


def check_norms(
    packed: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.float32],
    cold_format: ColdFormat,
    shape: KVShape,
    keys: dict[str, Any],
    slack: float,
) -> None:
    """Each norm is what its format says of the group's own codes, whichever these are: a group of
    turbo3 has with itself as it was the product that this had, one of turbo4 is as long as it was.
    """
    group = cold_format.group(shape)
    was = _packed_numbers(numbers, shape, **keys).reshape(-1, group)
    now = unpack_buffer(packed, cold_format, shape).astype(np.float64).reshape(-1, group)
    squares = np.square(was).sum(-1)
    if cold_format is ColdFormat.TURBO3:
        assert (was * now).sum(-1) == pytest.approx(squares, rel=F16_ROUNDING + slack)
    else:
        lengths = np.linalg.norm(now, axis=-1)
        assert lengths == pytest.approx(np.sqrt(squares), rel=F16_ROUNDING + slack)


def _packed_numbers(
    numbers: npt.NDArray[np.float32],
    shape: KVShape,
    frequencies: npt.NDArray[np.uint32] | None = None,
    means: npt.NDArray[np.float32] | None = None,
    block_ordinal: int = 0,
) -> _Floats:
    """What of hot numbers is packed: without position and mean."""
    result = numbers.astype(np.float64)
    if frequencies is not None:
        low, high = np.split(result, 2, -1)
        steps = phase_steps(frequencies, block_ordinal, shape.tokens_per_block)
        turned = (low + 1j * high) * np.exp(-1j * RADIANS_PER_STEP * steps)
        result = np.concatenate([turned.real, turned.imag], -1)
    return result if means is None else result - means[:, None]
