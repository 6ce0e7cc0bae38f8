"""A codec's way out and back, over hot pages that stay where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from coldpage.codecs import ColdPageCodec, close_codec, configure_taken
from coldpage.device.base import MemoryKind
from coldpage.migration import CodecCalls
from coldpage.types import BlockOrdinal, Int32Array, LayerGroupId, LifeCycleId

if TYPE_CHECKING:
    from coldpage.manager import KVCacheManager
    from coldpage.sequence import KVCache

__all__ = ["RoundTrip"]


class RoundTrip:
    """Does to pages of a manager's hot level what leaving it and coming back does. ``codec`` is
    consumed here, and not the manager's. The memory ends with the device.

    Raises ConfigurationError where the codec refuses the pages.
    """

    def __init__(self, manager: KVCacheManager, codec: ColdPageCodec) -> None:
        self._layout = manager.layout
        self._configured = configure_taken(codec, manager.hot_pool_groups())
        self._calls = CodecCalls(manager.device, [self._configured])
        self._stream = manager.device.create_stream("round trip")
        self._device = manager.device
        self._configured.codec.prepare(self._stream)

    def run(self, kv_cache: KVCache, places: Iterable[tuple[LayerGroupId, BlockOrdinal]]) -> None:
        """Encodes and decodes the cache's pages in these places. They are hot, and nothing else
        uses them. Blocks until it is done."""
        members: dict[LifeCycleId, list[tuple[int, BlockOrdinal]]] = {}
        for group, block in places:
            life_cycle = self._layout.life_cycle_of(group, block)
            members.setdefault(life_cycle, []).append((kv_cache.page_indices(group)[block], block))
        for life_cycle, pages in members.items():
            slots, ordinals = (np.array(column, np.int32) for column in zip(*pages, strict=True))
            self._run(life_cycle, slots, ordinals)

    def _run(self, life_cycle: LifeCycleId, slots: Int32Array, ordinals: Int32Array) -> None:
        page_bytes = self._configured.cold_page_bytes[life_cycle]
        cold = np.arange(slots.size, dtype=np.int32)
        memory = self._device.allocate(slots.size * page_bytes, MemoryKind.DEVICE)
        first = LifeCycleId(int(self._configured.representative[life_cycle]))
        out = (self._configured, first, memory.address)
        try:
            self._calls.encode(*out, cold, slots, ordinals, self._stream)
            self._calls.decode(*out, slots, cold, ordinals, self._stream)
        finally:
            self._stream.synchronize()
            memory.free()

    def close(self) -> None:
        """Close the codec. The manager is still open."""
        self._stream.synchronize()
        self._calls.close()
        close_codec(self._configured.codec)
