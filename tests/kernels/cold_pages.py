"""What tests of the packed formats share: shapes, numbers like those of a model, pages of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from coldpage.kernels.cold.formats import ColdFormat, KVShape, NumberType, PackedBuffers
from coldpage.kernels.cold.numbers import MAGNITUDES
from coldpage.types import PAGE_INDEX_PAIR

LLAMA_8B: Final = KVShape(8, 16, 128, NumberType.BF16)
SMOLLM2: Final = KVShape(3, 16, 64, NumberType.BF16)

# What no kernel may write to holds this.
UNTOUCHED: Final = 0xA5


def model_like(shape: KVShape, seed: int) -> npt.NDArray[np.float32]:
    """Numbers [kv_heads, tokens, head_dim] with a few strong channels and offsets, as keys have."""
    rng = np.random.default_rng(seed)
    heads, tokens, head_dim, _ = shape
    numbers = rng.standard_normal((heads, tokens, head_dim)) * rng.lognormal(size=(heads, 1, 1))
    numbers[..., rng.integers(head_dim, size=3)] *= 8.0
    numbers += rng.standard_normal((heads, 1, head_dim))
    return numbers.astype(np.float32)


def frequencies_of(head_dim: int, base: float = 10_000.0) -> npt.NDArray[np.uint32]:
    """Rotary frequencies as formats want them: 2**-32 turns a token."""
    exponents = np.arange(head_dim // 2) * 2.0 / head_dim
    return np.round(base**-exponents / (2 * np.pi) * 2.0**32).astype(np.uint32)


def parameters_of(
    packed: npt.NDArray[np.uint8], cold_format: ColdFormat, shape: KVShape
) -> npt.NDArray[np.float16]:
    """The f16 parameters of a packed buffer, as they lie there."""
    start = cold_format.code_bytes(shape)
    raw = packed[start : start + 2 * cold_format.num_parameters(shape)]
    return raw.copy().view(np.float16)


def levels_of(
    packed: npt.NDArray[np.uint8], cold_format: ColdFormat, shape: KVShape
) -> npt.NDArray[np.int64]:
    """The codes of a packed buffer [kv_heads, tokens, head_dim] as whole numbers of which those of
    neighbouring values are neighbours."""
    raw = packed[: cold_format.code_bytes(shape)]
    rows = raw.reshape(*shape[:2], -1)
    if cold_format is ColdFormat.INT8:
        return rows.view(np.int8).astype(np.int64)
    if cold_format is ColdFormat.FP8:
        size = (rows & 127).astype(np.int64)
        return np.where(rows & 128, -size, size)
    if cold_format is ColdFormat.TURBO3:
        parts = np.split(raw, [raw.size // 3 * 2])
        low, high = (part.reshape(*shape[:2], -1) for part in parts)
        low = np.concatenate([low >> (2 * j) & 3 for j in range(4)], -1)
        codes = low + 4 * np.concatenate([high >> j & 1 for j in range(8)], -1)
    else:
        codes = np.concatenate([rows & 15, rows >> 4], -1)
    codes = codes.astype(np.int64)
    if cold_format not in MAGNITUDES:
        return codes
    num = len(MAGNITUDES[cold_format])
    return np.where(codes >= num, num - 1 - codes, codes)


def to_hot(numbers: npt.NDArray[np.float32], number_type: NumberType) -> npt.NDArray[np.uint8]:
    """Numbers as a hot buffer has them; bf16 cut off, not rounded."""
    if number_type is NumberType.BF16:
        raw: npt.NDArray[Any] = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = numbers.astype(np.float16 if number_type is NumberType.F16 else np.float32)
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)


def from_hot(raw: npt.NDArray[np.uint8], shape: KVShape) -> npt.NDArray[np.float32]:
    """A hot buffer as f32 [kv_heads, tokens, head_dim]."""
    if shape.number_type is NumberType.BF16:
        numbers = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif shape.number_type is NumberType.F16:
        numbers = raw.view(np.float16).astype(np.float32)
    else:
        numbers = raw.view(np.float32).copy()
    return numbers.reshape(shape[:3])


@dataclass
class Pages:
    """Hot and cold pages in memory of this process, of which a call moves some, in any order."""

    buffers: PackedBuffers
    hot: npt.NDArray[np.uint8]  # [num_slots, num_buffers, gap + buffer]
    cold: npt.NDArray[np.uint8]  # [num_cold_pages, cold_page_bytes]
    pairs: npt.NDArray[np.void]  # dst: cold page, src: hot slot
    ordinals: npt.NDArray[np.int32]

    @property
    def back(self) -> npt.NDArray[np.void]:
        """The pairs of the way back: dst hot slot, src cold page."""
        pairs = np.empty_like(self.pairs)
        pairs["dst"], pairs["src"] = self.pairs["src"], self.pairs["dst"]
        return pairs

    @property
    def cold_base(self) -> int:
        return int(self.cold.ctypes.data)

    def hot_buffer(self, i: int, b: int) -> npt.NDArray[np.uint8]:
        """Of the ``i``-th page of the call."""
        return self.hot[self.pairs["src"][i], b, -self.buffers.shape.num_bytes :]

    def packed_buffer(self, i: int, b: int) -> npt.NDArray[np.uint8]:
        start = self.buffers.cold_offset_bytes[b]
        num_bytes = self.buffers.cold_format.buffer_bytes(self.buffers.shape)
        return self.cold[self.pairs["dst"][i], start : start + num_bytes]

    def keys(self, i: int, b: int) -> dict[str, Any]:
        """What the reference wants to know beside the numbers."""
        frequencies, means = self.buffers.frequencies, self.buffers.means
        return {
            "frequencies": None if frequencies is None else frequencies[b],
            "means": None if means is None else means[b],
            "block_ordinal": int(self.ordinals[i]),
        }


def make_pages(
    cold_format: ColdFormat,
    shape: KVShape,
    *,
    num_pages: int = 3,
    num_buffers: int = 2,
    is_keys: bool = False,
) -> Pages:
    """``num_pages`` pages with ``num_buffers`` buffers, and two slots more on each side. Keys have
    frequencies, of two kinds, and means."""
    rng = np.random.default_rng(11)
    gap_bytes = 64
    hot = np.full((num_pages + 2, num_buffers, gap_bytes + shape.num_bytes), UNTOUCHED, np.uint8)
    for s, b in np.ndindex(hot.shape[:2]):
        numbers = model_like(shape, seed=s * num_buffers + b)
        hot[s, b, gap_bytes:] = to_hot(numbers, shape.number_type)
    buffer_bytes = cold_format.buffer_bytes(shape)
    cold = np.full((num_pages + 2, num_buffers * (buffer_bytes + 16) + 32), UNTOUCHED, np.uint8)
    frequencies = means = None
    if is_keys:
        bases = [10_000.0 if b % 3 else 500_000.0 for b in range(num_buffers)]
        frequencies = np.stack([frequencies_of(shape.head_dim, base) for base in bases])
        means = rng.standard_normal((num_buffers, shape.num_kv_heads, shape.head_dim))
        means = means.astype(np.float32)
    buffer_index = np.arange(num_buffers)
    buffers = PackedBuffers(
        cold_format,
        shape,
        hot.ctypes.data + gap_bytes + buffer_index * hot.strides[1],
        np.full(num_buffers, hot.strides[0]),
        16 + buffer_index * (buffer_bytes + 16),
        cold.strides[0],
        frequencies,
        means,
    )
    pairs = np.empty(num_pages, PAGE_INDEX_PAIR)
    pairs["dst"] = rng.permutation(num_pages + 2)[:num_pages]
    pairs["src"] = rng.permutation(num_pages + 2)[:num_pages]
    ordinals = rng.integers(2**20, size=num_pages).astype(np.int32)
    return Pages(buffers, hot, cold, pairs, ordinals)
