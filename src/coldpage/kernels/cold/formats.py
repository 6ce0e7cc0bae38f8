"""How the keys or values of one block and layer lie in a cold page: sizes, order, numbers of bits.

A hot *buffer* holds vectors of a plain type, ``[kv_heads, tokens_per_block, head_dim]``. Packed, it
is codes, in that order, and behind them the parameters that turn codes into numbers, in f16 unless
said otherwise; then zeros up to a multiple of 16 bytes.

| format | codes | parameters | number |
|---|---|---|---|
| int8 | int8 a number | scale [kv_heads, tokens] | code x scale |
| fp8 | e4m3 a number | scale [kv_heads, tokens] | code x scale |
| int4_token | 4 bits: 0-15 | scale, minimum [kv_heads, tokens, groups, 2] | code x scale + min |
| int4_channel | 4 bits: 0-15 | scale, minimum [kv_heads, groups, head_dim, 2] | the same |
| turbo4 | 4 bits | norm [kv_heads, tokens, groups] | norm x codebook, rotated back |
| turbo3 | 3 bits | norm [kv_heads, tokens, groups] | the same |
| int4_block | 4 bits, 8 + (-7 to 7) | one f32 scale | (code - 8) x scale |

4 bits: byte ``i`` of a vector's ``head_dim / 2`` has number ``i`` in its low half and number
``i + head_dim / 2`` in its high half. 3 bits: two parts, each in the order of the vectors. In the
first, byte ``i`` of a vector's ``head_dim / 4`` has the lower two bits of the numbers
``i + j * head_dim / 4`` at bit ``2 * j``; in the second, which begins behind the first of all
vectors, byte ``i`` of a vector's ``head_dim / 8`` has the high bit of the numbers
``i + j * head_dim / 8`` at bit ``j``. Rows of both are powers of two, so that a GPU moves whole
lines of memory.

Groups: of int4_token at most 64 numbers of a vector that follow each other, of int4_channel at most
64 tokens of the block, of turbo at most 128 numbers of a vector. A rotated number's code is its
magnitude, of which there are 8 or 4, and above that bit its sign.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from coldpage.types import Int64Array

__all__ = ["ALIGNMENT_BYTES", "FORMATS", "ColdFormat", "KVShape", "NumberType", "PackedBuffers"]

ALIGNMENT_BYTES: Final = 16
_MAX_INT4_GROUP: Final = 64
_MAX_TURBO_GROUP: Final = 128
_ROTATED_HEADS: Final = (64, 128, 256, 512)
_ROTATED_NAMES: Final = "64, 128, 256 or 512"


class NumberType(enum.Enum):
    """What hot pages hold; the value is its name in the identity of pages."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"

    @property
    def num_bytes(self) -> int:
        """Of one number."""
        return 4 if self is NumberType.F32 else 2


class KVShape(NamedTuple):
    """The keys, or the values, of one block and layer, as hot pages hold them."""

    num_kv_heads: int
    tokens_per_block: int
    head_dim: int
    number_type: NumberType

    @property
    def num_numbers(self) -> int:
        """Of one buffer."""
        return self.num_kv_heads * self.tokens_per_block * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Of one hot buffer."""
        return self.num_numbers * self.number_type.num_bytes


class ColdFormat(enum.Enum):
    """See the table above."""

    INT8 = "int8"
    FP8 = "fp8"
    INT4_TOKEN = "int4_token"
    INT4_CHANNEL = "int4_channel"
    TURBO4 = "turbo4"
    TURBO3 = "turbo3"
    INT4_BLOCK = "int4_block"

    @property
    def bits(self) -> int:
        """Of one number's code."""
        if self in (ColdFormat.INT8, ColdFormat.FP8):
            return 8
        return 3 if self is ColdFormat.TURBO3 else 4

    @property
    def is_rotated(self) -> bool:
        """Whether vectors are multiplied by a Hadamard matrix."""
        return self in (ColdFormat.TURBO4, ColdFormat.TURBO3)

    def group(self, shape: KVShape) -> int:
        """Numbers, or tokens, that share parameters."""
        if self is ColdFormat.INT4_TOKEN:
            return min(_MAX_INT4_GROUP, shape.head_dim)
        if self is ColdFormat.INT4_CHANNEL:
            return min(_MAX_INT4_GROUP, shape.tokens_per_block)
        if self.is_rotated:
            return min(_MAX_TURBO_GROUP, shape.head_dim)
        return shape.num_numbers if self is ColdFormat.INT4_BLOCK else shape.head_dim

    def refusal(self, shape: KVShape) -> str | None:
        """Why vectors of this shape can not be packed so; None where they can."""
        _, tokens, head_dim, _ = shape
        group = self.group(shape)
        if head_dim % 8:
            return f"heads of {head_dim} numbers are no multiple of 8"
        if self.is_rotated and head_dim not in _ROTATED_HEADS:
            return f"heads have {head_dim} numbers and not {_ROTATED_NAMES}"
        if self is ColdFormat.INT4_TOKEN and head_dim % group:
            return f"heads of {head_dim} numbers are no multiple of {group}"
        if self is ColdFormat.INT4_CHANNEL and tokens % group:
            return f"blocks of {tokens} tokens are no multiple of {group}"
        return None

    def num_parameters(self, shape: KVShape) -> int:
        """f16 parameters of a buffer."""
        heads, tokens, head_dim, _ = shape
        if self is ColdFormat.INT4_BLOCK:
            return 2
        if self is ColdFormat.INT4_CHANNEL:
            return heads * (tokens // self.group(shape)) * head_dim * 2
        groups = head_dim // self.group(shape)
        return heads * tokens * groups * (2 if self is ColdFormat.INT4_TOKEN else 1)

    def code_bytes(self, shape: KVShape) -> int:
        """Codes of a buffer; the parameters follow at once."""
        return shape.num_numbers * self.bits // 8

    def buffer_bytes(self, shape: KVShape) -> int:
        """Of a packed buffer: a multiple of ALIGNMENT_BYTES."""
        num_bytes = self.code_bytes(shape) + 2 * self.num_parameters(shape)
        return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


FORMATS: Final = {cold_format.value: cold_format for cold_format in ColdFormat}


@dataclass(frozen=True, slots=True, eq=False)
class PackedBuffers:
    """Buffers of equal shape and format of the pages of one kind: what one call packs or unpacks.

    Buffer ``b`` of hot slot ``s`` lies at ``hot_base[b] + s * hot_stride_bytes[b]``; in cold page
    ``p`` at ``cold_base`` it lies at ``cold_base + p * cold_page_bytes + cold_offset_bytes[b]``.

    Keys whose format leaves out their position have ``frequencies``: before a key of the token at
    position ``t`` is packed, it is turned back by ``t * frequencies[b, i] / 2**32`` of a full turn,
    in the plane of its numbers ``i`` and ``i + head_dim / 2``; ``t`` is ``block_ordinal *
    tokens_per_block`` plus the token's place in the block, and the product is cut to 32 bits, which
    is the same on every device. Then ``means`` are subtracted. Unpacking does the inverse.
    """

    cold_format: ColdFormat
    shape: KVShape
    hot_base: Int64Array  # [num_buffers]
    hot_stride_bytes: Int64Array  # [num_buffers]
    cold_offset_bytes: Int64Array  # [num_buffers]
    cold_page_bytes: int
    frequencies: npt.NDArray[np.uint32] | None  # [num_buffers, head_dim / 2]
    means: npt.NDArray[np.float32] | None  # [num_buffers, kv_heads, head_dim]
