"""The lossless default: a cold page is the page's pool contributions one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpage.codecs.base import BlockOrdinals, ColdPageCodec, PageIndices, PoolGroupDesc
from coldpage.device.base import Stream
from coldpage.errors import CodecError, UsageError
from coldpage.types import Int32Array, Int64Array, LifeCycleId, MemAddress, PageIndexLocation

__all__ = ["create_default_cold_page_codec"]


@dataclass(frozen=True, slots=True)
class _PageShape:
    """One pool group as columns over its pools [num_pools, 1].

    Descriptors come pool by pool: numpy's inner loop then runs over pages, not over the few pools.
    """

    hot_base: Int64Array
    hot_stride: Int64Array
    cold_offset: Int64Array
    cold_page_bytes: int
    representative: LifeCycleId

    def hot_addresses(self, slots: Int32Array) -> Int64Array:
        """Of every pool's part of the pages in ``slots``, [num_pools * num_pages]."""
        addresses = slots.astype(np.int64) * self.hot_stride
        addresses += self.hot_base
        return addresses.reshape(-1)

    def cold_addresses(self, base: MemAddress, indices: Int32Array) -> Int64Array:
        """Where those parts lie in the cold pages."""
        pages = indices.astype(np.int64)
        pages *= self.cold_page_bytes
        return (pages + (self.cold_offset + base)).reshape(-1)

    def sizes(self, num_pages: int) -> Int64Array:
        """Of those parts."""
        return np.repeat(self.hot_stride, num_pages)


class _ConcatCodec(ColdPageCodec):
    """One descriptor a page and pool, one batched copy a call."""

    codec_id = "concat"
    is_lossless = True

    def __init__(self) -> None:
        self._shapes: dict[LifeCycleId, _PageShape] = {}

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        for group in pool_groups:
            sizes = np.array([[p.slot_bytes] for p in group.pools], np.int64)
            if not group.life_cycles:
                raise CodecError(
                    f"pool group {group.pool_group_index} has no life cycle: leave it out"
                )
            shape = _PageShape(
                hot_base=np.array([[p.base_address] for p in group.pools], np.int64),
                hot_stride=sizes,
                cold_offset=np.cumsum(sizes, axis=0) - sizes,
                cold_page_bytes=int(sizes.sum()),
                representative=min(lc.life_cycle_id for lc in group.life_cycles),
            )
            for life_cycle in group.life_cycles:
                self._shapes[life_cycle.life_cycle_id] = shape

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        return self._shape(life_cycle_id).cold_page_bytes

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        return self._shape(life_cycle_id).representative

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        self._shape(life_cycle_id)
        return PageIndexLocation.HOST

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        assert isinstance(page_indices, np.ndarray), "host indices, as it asked for"
        shape = self._shape(life_cycle_id)
        hot = shape.hot_addresses(page_indices["src"])
        cold = shape.cold_addresses(dst_base, page_indices["dst"])
        stream.copy(cold, hot, shape.sizes(page_indices.size))

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        assert isinstance(page_indices, np.ndarray), "host indices, as it asked for"
        shape = self._shape(life_cycle_id)
        hot = shape.hot_addresses(page_indices["dst"])
        cold = shape.cold_addresses(src_base, page_indices["src"])
        stream.copy(hot, cold, shape.sizes(page_indices.size))

    def _shape(self, life_cycle_id: LifeCycleId) -> _PageShape:
        try:
            return self._shapes[life_cycle_id]
        except KeyError:
            raise UsageError(
                f"codec {self.codec_id} does not know life cycle {life_cycle_id}: "
                "configure it with its pool group first"
            ) from None


def create_default_cold_page_codec() -> ColdPageCodec:
    """A new concatenating codec. A manager makes its own when none is given; this one is for codec
    authors.
    """
    return _ConcatCodec()
