"""How keys and values are stored in hot pages: the types, and where in a buffer each part lies.

A *vector* is the K or V of one token and KV head: ``head_dim`` numbers, in *parts* of as many as
share a scale (all of them, where there are no scales). A buffer holds the vectors of one block,
layer and role, head by head, so that what one KV head reads of a page is contiguous; behind them
the scales, where the type has them:

    plain types  [kv_heads, tokens_per_block, head_dim]
    packed keys  [kv_heads, parts, tokens_per_block, part_values]
    packed values  [kv_heads, parts, part_values, tokens_per_block]
    scales       [kv_heads, tokens_per_block, parts] f16

A part is what attention multiplies at a time. It adds up a key's numbers and a value's tokens, so
those are neighbours: as 16 bits they would be turned on their way through shared memory, which
bytes can not be.

| type | values of a part | scale |
|---|---|---|
| f32, f16, bf16 | head_dim numbers | none |
| q8_0 | 32 int8 | value = int8 x scale |
| turbo4 | 64 bytes for 128 numbers (32 for 64, where that is head_dim) | the norm |

``turbo4`` stores the rotated vector (``kernels.rotation``), and 4 bits a number: an index into the
codebook, whose low 3 bits are the magnitude and whose high bit is the sign. Byte ``i`` of a part
of ``n`` numbers holds number ``i`` in its low half and number ``i + n / 2`` in its high half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

__all__ = [
    "BF16",
    "F16",
    "F32",
    "KV_TYPES",
    "Q8_0",
    "TURBO4",
    "KVPages",
    "KVType",
    "page_views",
    "plain_type",
]

# Of the format, kept in the identity of pages: change it with the bytes.
_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class KVType:
    """A way to store vectors. ``group`` is how many numbers share a scale, None where none do."""

    name: str
    value_dtype: torch.dtype
    bits: int  # of a stored number, without scales
    max_group: int | None
    is_rotated: bool

    def group(self, head_dim: int) -> int | None:
        """Numbers that share a scale, for this head size."""
        return None if self.max_group is None else min(self.max_group, head_dim)

    def supports(self, head_dim: int) -> bool:
        """Whether vectors of this size can be stored: whole groups, and rotated ones of 64 or more
        numbers, a power of two."""
        group = self.group(head_dim)
        if group is None:
            return True
        return head_dim % group == 0 and (not self.is_rotated or group in (64, 128))

    def num_values(self, head_dim: int) -> int:
        """Elements of ``value_dtype`` in a vector."""
        return head_dim * self.bits // (8 * self.value_dtype.itemsize)

    def num_scales(self, head_dim: int) -> int:
        """Scales (f16) of a vector."""
        group = self.group(head_dim)
        return 0 if group is None else head_dim // group

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of a vector with its scales."""
        return head_dim * self.bits // 8 + 2 * self.num_scales(head_dim)

    @property
    def identity(self) -> str:
        """What makes bytes of this type readable; part of the identity of pages."""
        return f"{self.name}/{_FORMAT_VERSION}"


F32: Final = KVType("f32", torch.float32, 32, None, is_rotated=False)
F16: Final = KVType("f16", torch.float16, 16, None, is_rotated=False)
BF16: Final = KVType("bf16", torch.bfloat16, 16, None, is_rotated=False)
Q8_0: Final = KVType("q8_0", torch.int8, 8, 32, is_rotated=False)
TURBO4: Final = KVType("turbo4", torch.uint8, 4, 128, is_rotated=True)

KV_TYPES: Final = {kv_type.name: kv_type for kv_type in (F32, F16, BF16, Q8_0, TURBO4)}


def plain_type(dtype: torch.dtype) -> KVType:
    """The type that stores numbers of ``dtype`` as they are."""
    return next(t for t in (F32, F16, BF16) if t.value_dtype == dtype)


class KVPages(NamedTuple):
    """One layer's K or V in the hot pool: views, in the order in which attention thinks of them."""

    kv_type: KVType
    values: torch.Tensor  # [num_slots, tokens_per_block, kv_heads, parts, part_values]
    scales: torch.Tensor | None  # [num_slots, tokens_per_block, kv_heads, parts] f16

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a page."""
        return self.values.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a token."""
        return self.values.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers of a vector."""
        num_values = self.values.shape[3] * self.values.shape[4]
        return num_values * self.values.element_size() * 8 // self.kv_type.bits


def page_views(
    pool: torch.Tensor,
    kv_type: KVType,
    tokens_per_block: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    is_value: bool,
) -> KVPages:
    """The views of a pool of buffers, uint8 [num_slots, buffer_bytes], whose rows may be any number
    of bytes apart, that hold keys, or values. No copy."""
    assert pool.dtype == torch.uint8 and kv_type.supports(head_dim)
    vectors = num_kv_heads * tokens_per_block
    assert pool.shape[1] == vectors * kv_type.vector_bytes(head_dim)
    num_scales = kv_type.num_scales(head_dim)
    num_parts = max(1, num_scales)
    part_values = kv_type.num_values(head_dim) // num_parts
    split = pool.shape[1] - vectors * num_scales * 2
    values = pool[:, :split].view(kv_type.value_dtype)
    if not num_scales:
        plain = values.view(-1, num_kv_heads, tokens_per_block, 1, part_values)
        return KVPages(kv_type, plain.transpose(1, 2), None)
    if is_value:
        packed = values.view(-1, num_kv_heads, num_parts, part_values, tokens_per_block)
        values = packed.permute(0, 4, 1, 2, 3)
    else:
        packed = values.view(-1, num_kv_heads, num_parts, tokens_per_block, part_values)
        values = packed.permute(0, 3, 1, 2, 4)
    scales = pool[:, split:].view(torch.float16)
    return KVPages(
        kv_type,
        values,
        scales.view(-1, num_kv_heads, tokens_per_block, num_scales).transpose(1, 2),
    )
