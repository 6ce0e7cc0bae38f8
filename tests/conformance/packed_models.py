"""Small models of real geometry, as the codec kit's hot pool groups: for codecs that pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.codecs import BufferDesc, KVShape, LayerVectors, LifeCycleDesc, ModelPages, NumberType
from coldpage.codecs.packed import PACKED_FORMATS
from coldpage.kernels.cold.formats import ColdFormat
from coldpage.testing.hot_shapes import HotBuffer, HotGroupShape
from coldpage.types import LayerGroupId, LayerId, PageClass

__all__ = [
    "BLOCK",
    "ERRORS",
    "GEMMA",
    "LLAMA",
    "SMOL",
    "Model",
    "contents",
    "format_of",
    "numbers_of",
    "relative_error",
    "split_row",
    "stored",
]

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

BLOCK: Final = 16
# Of Gaussian numbers, the length of the error relative to theirs: what the formats cost, and a bit.
ERRORS: Final = {
    ColdFormat.INT8: 0.012,
    ColdFormat.FP8: 0.04,
    ColdFormat.INT4_TOKEN: 0.12,
    ColdFormat.INT4_CHANNEL: 0.12,
    ColdFormat.TURBO4: 0.12,
    ColdFormat.TURBO3: 0.22,
    ColdFormat.INT4_BLOCK: 0.22,
}


@dataclass(frozen=True)
class Model:
    """Layers by layer group, each with keys and values of one shape; layer groups share a hot pool
    group. Layer 0 of each has some state as well, each in a pool of its own.
    """

    num_heads: int
    head_dim: int
    num_layers: int = 2
    layer_groups: tuple[int, ...] = (0,)
    state_bytes: tuple[int, ...] = ()
    number_type: NumberType = NumberType.BF16
    bases: tuple[float, ...] = (10_000.0, 1_000_000.0)

    @property
    def shape(self) -> KVShape:
        return KVShape(self.num_heads, BLOCK, self.head_dim, self.number_type)

    @property
    def hot_group(self) -> HotGroupShape:
        size = self.shape.num_bytes
        vectors = [
            HotBuffer(layer, role, size)
            for layer in range(self.num_layers)
            for role in ("key", "value")
        ]
        states = [
            [HotBuffer(0, f"state{number}", size)] for number, size in enumerate(self.state_bytes)
        ]
        return HotGroupShape.of_buffers([vectors, *states], self.layer_groups)

    def pages(self, *, has_frequencies: bool = True, has_means: bool = True) -> ModelPages:
        """Each layer group turns its keys with a base of its own."""
        pages: dict[LayerId, LayerVectors] = {}
        for number, group in enumerate(self.layer_groups):
            exponents = np.arange(self.head_dim // 2) * 2 / self.head_dim
            turns = self.bases[number % len(self.bases)] ** -exponents / (2 * np.pi)
            frequencies = np.round(turns * 2.0**32).astype(np.uint32)
            for layer in range(self.num_layers):
                layer_id = LayerId(100 * group + layer)
                rng = np.random.default_rng(layer_id)
                means = 0.3 * rng.standard_normal((self.num_heads, self.head_dim), np.float32)
                pages[layer_id] = LayerVectors(
                    self.shape,
                    self.shape,
                    frequencies if has_frequencies else None,
                    means if has_means else None,
                )
        return pages


SMOL: Final = Model(3, 64)
LLAMA: Final = Model(8, 128)
GEMMA: Final = Model(1, 256, layer_groups=(1, 2), state_bytes=(33,))


def contents(number_type: NumberType, rng: np.random.Generator, num_bytes: int) -> _Bytes:
    """Gaussian numbers."""
    floats = rng.standard_normal(num_bytes // 2 + 1, np.float32)
    return stored(floats, number_type)[:num_bytes]


def stored(floats: _Floats, number_type: NumberType) -> _Bytes:
    """Numbers as hot pages have them; bf16 by cutting."""
    if number_type is NumberType.F32:
        return floats.reshape(-1).view(np.uint8)
    if number_type is NumberType.F16:
        return floats.astype(np.float16).reshape(-1).view(np.uint8)
    return floats.reshape(-1, 1).view(np.uint16)[:, 1].copy().view(np.uint8)


def numbers_of(raw: _Bytes, shape: KVShape) -> _Floats:
    """A hot buffer's numbers f32 [kv_heads, tokens_per_block, head_dim]."""
    if shape.number_type is NumberType.F32:
        floats = raw.view(np.float32)
    elif shape.number_type is NumberType.F16:
        floats = raw.view(np.float16).astype(np.float32)
    else:
        floats = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return floats.reshape(shape[:3])


def format_of(
    name: str,
    life_cycle: LifeCycleDesc,
    buffer: BufferDesc,
    overrides: Mapping[LayerGroupId, str],
) -> ColdFormat | None:
    """How a buffer ought to be packed; None where it is copied."""
    formats = PACKED_FORMATS[overrides.get(life_cycle.layer_group_id, name)]
    role = buffer.buffer_id.role
    if formats is None or role not in ("key", "value") or life_cycle.page_class is PageClass.SINK:
        return None
    return formats.key if role == "key" else formats.value


def relative_error(was: _Floats, now: _Floats) -> float:
    """The length of the difference over the length."""
    return float(np.linalg.norm(now - was) / np.linalg.norm(was))


def split_row(row: _Bytes, shape: HotGroupShape, buffers: Sequence[BufferDesc]) -> list[_Bytes]:
    """The buffers of a hot page [page_bytes], pools one after another."""
    starts = np.cumsum((0, *shape.pool_bytes))
    return [row[starts[b.pool_index] + b.offset_bytes :][: b.num_bytes].copy() for b in buffers]
