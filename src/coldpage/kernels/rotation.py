"""The rotation that makes vectors look Gaussian, and the numbers that stand for rotated ones.

A group of a vector is multiplied by a Hadamard matrix with fixed random signs on its input side, so
a few strong channels are spread over all numbers of the group. What comes out is close to normally
distributed whatever went in, and one codebook serves every layer and model. Dot products stay what
they were: attention with rotated keys takes a rotated query, and weights rotated values into a
rotated output.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final

import torch

from coldpage.kernels.cold import numbers
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.kernels.kv_types import KVType

__all__ = [
    "CODEBOOK",
    "CODE_STEPS",
    "MAGNITUDE_STEPS",
    "THRESHOLDS",
    "codebook",
    "rotate",
    "rotate_back",
    "rotation",
    "signs",
]

CODE_STEPS: Final = 19.495748
"""Of the steps of this size in 1, the magnitudes are whole ones and a half: 7 bits hold them with
their sign, so that attention looks them up as bytes. It adds 0.0076 (rms) to the 0.0975 that
quantising costs; this many steps add least."""

MAGNITUDE_STEPS: Final = tuple(
    round(best * CODE_STEPS - 0.5) for best in numbers.MAGNITUDES[ColdFormat.TURBO4]
)

_MAGNITUDES: Final = tuple((steps + 0.5) / CODE_STEPS for steps in MAGNITUDE_STEPS)

CODEBOOK: Final = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
"""What a 4-bit index stands for: the low 3 bits are the magnitude, bit 3 is the sign."""

THRESHOLDS: Final = tuple((low + high) / 2 for low, high in pairwise(_MAGNITUDES))
"""Magnitudes above threshold ``i`` are closer to magnitude ``i + 1`` of the codebook."""


def signs(group: int) -> torch.Tensor:
    """The fixed signs of a group's numbers, +-1.0 f32 [group]; the same in every process."""
    return torch.tensor(numbers.signs(group))


@lru_cache(maxsize=64)
def rotation(group: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The rotation of row vectors, times sqrt(group): +-1 in ``dtype``, [group, group].

    Kept and shared, so not to be written to. The first call for a device copies from the host,
    which a CUDA graph cannot capture: call it once before.
    """
    return (signs(group)[:, None] * torch.tensor(numbers.hadamard(group))).to(device, dtype)


@lru_cache(maxsize=64)
def codebook(device: torch.device) -> torch.Tensor:
    """CODEBOOK as f32 [16]. Shared, and copied from the host by the first call, as ``rotation``."""
    return torch.tensor(CODEBOOK, device=device)


def rotate(x: torch.Tensor, kv_type: KVType) -> torch.Tensor:
    """Vectors [..., head_dim] in the space in which ``kv_type`` stores them: rotated per group, or
    ``x`` itself. Pure; enqueues one matrix product, and one copy where ``x`` is not contiguous.
    """
    return _times(x, kv_type, is_back=False)


def rotate_back(x: torch.Tensor, kv_type: KVType) -> torch.Tensor:
    """The inverse of ``rotate``."""
    return _times(x, kv_type, is_back=True)


def _times(x: torch.Tensor, kv_type: KVType, *, is_back: bool) -> torch.Tensor:
    group = kv_type.group(x.shape[-1])
    if not kv_type.is_rotated or group is None:
        return x
    matrix = rotation(group, x.device, x.dtype)
    rows = x.reshape(-1, group)
    # The factor goes into the product, before its result is rounded to the type: sums of f16
    # numbers would overflow, and it is one launch. With beta = 0 the first argument is not read.
    rotated = torch.addmm(rows, rows, matrix.T if is_back else matrix, beta=0.0, alpha=group**-0.5)
    return rotated.view(x.shape)
