"""Hot pool groups that a codec is tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coldpage.codecs.base import BufferDesc
from coldpage.types import BufferId, BufferRole, LayerId, PoolIndex

__all__ = ["HotBuffer", "HotGroupShape"]


@dataclass(frozen=True, slots=True)
class HotBuffer:
    """A buffer of a hot page. Layers count within a layer group: layer ``l`` of layer group ``g``
    has the id ``100 * g + l``.
    """

    layer: int
    role: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HotGroupShape:
    """A hot pool group: bytes of a slot by pool, and the layer groups whose pages live there.

    ``buffers``, by pool, fill the slots; without them each pool is a layer of its own, with a key
    and a value of equal size, or a key alone where the size is odd.
    """

    pool_bytes: tuple[int, ...]
    layer_groups: tuple[int, ...]
    buffers: tuple[tuple[HotBuffer, ...], ...] = ()

    @classmethod
    def of_buffers(
        cls, buffers: Sequence[Sequence[HotBuffer]], layer_groups: Sequence[int]
    ) -> HotGroupShape:
        """Pools of the size of their ``buffers``, which follow one another."""
        pools = tuple(tuple(pool) for pool in buffers)
        sizes = tuple(sum(buffer.num_bytes for buffer in pool) for pool in pools)
        return cls(sizes, tuple(layer_groups), pools)

    def describe_buffers(self, layer_group: int) -> tuple[BufferDesc, ...]:
        """Of the pages of a layer group, layer by layer, as a manager lists them."""
        pools = self.buffers or [
            _default_buffers(layer, size) for layer, size in enumerate(self.pool_bytes)
        ]
        found: list[BufferDesc] = []
        for pool, buffers in enumerate(pools):
            offset = 0
            for buffer in buffers:
                layer_id = LayerId(100 * layer_group + buffer.layer)
                buffer_id = BufferId(layer_id, BufferRole(buffer.role))
                found.append(BufferDesc(buffer_id, PoolIndex(pool), offset, buffer.num_bytes))
                offset += buffer.num_bytes
        return tuple(sorted(found, key=lambda buffer: buffer.buffer_id.layer_id))


def _default_buffers(layer: int, pool_bytes: int) -> tuple[HotBuffer, ...]:
    if pool_bytes % 2:
        return (HotBuffer(layer, "key", pool_bytes),)
    return tuple(HotBuffer(layer, role, pool_bytes // 2) for role in ("key", "value"))
