"""Numbers to stored numbers and back, by torch alone.

Plain types are a conversion. ``q8_0`` takes the largest of 32 magnitudes / 127, rounded up to f16,
as the scale, so that no quotient passes 127, and rounds quotients half to even. ``turbo4`` takes
the codebook value nearest to each number of the rotated group, relative to the group's root mean
square, and a norm (f16) for which ``norm * codebook[index]`` is as long as the group was.
"""

from __future__ import annotations

from typing import Final

import torch

from coldpage.kernels.kv_types import Q8_0, TURBO4, KVType
from coldpage.kernels.rotation import THRESHOLDS, codebook, rotation

__all__ = ["F16_MAX", "PER_127", "pack", "unpack"]

F16_MAX: Final = 65504.0
# Of a rounded product, where a quotient would be: one instruction, and the same on every device.
PER_127: Final = 1 / 127


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
    wanted = (groups.abs().amax(-1) * PER_127).clamp(max=F16_MAX)
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
    norm = (length / (code_length * group**0.5)).clamp(max=F16_MAX).to(torch.float16)
    low, high = index.to(torch.uint8).chunk(2, -1)
    return low | (high << 4), norm


def _unpack_turbo4(values: torch.Tensor) -> torch.Tensor:
    index = torch.cat([values & 15, values >> 4], -1)
    return codebook(values.device)[index.long()]


_PACKS: Final = {Q8_0: _pack_q8, TURBO4: _pack_turbo4}
_UNPACKS: Final = {Q8_0: _unpack_q8, TURBO4: _unpack_turbo4}
