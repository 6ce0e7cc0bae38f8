"""The lossless default: a cold page is the page's pool contributions one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpage.codecs.base import ColdPageCodec, PageIndexPairs, PoolGroupDesc
from coldpage.device.base import Stream
from coldpage.errors import CodecError, UsageError
from coldpage.types import Int64Array, LifeCycleId, MemAddress, PageIndexLocation

__all__ = ["create_default_cold_page_codec"]


@dataclass(frozen=True, slots=True)
class _PageShape:
    """One pool group as arrays over its pools [num_pools]."""

    hot_base: Int64Array
    hot_stride: Int64Array
    cold_offset: Int64Array
    cold_page_bytes: int
    representative: LifeCycleId


class _ConcatCodec(ColdPageCodec):
    """One descriptor a page and pool, one batched copy a call."""

    codec_id = "concat"
    is_lossless = True

    def __init__(self) -> None:
        self._shapes: dict[LifeCycleId, _PageShape] = {}

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        for group in pool_groups:
            sizes = np.array([p.slot_bytes for p in group.pools], np.int64)
            if not group.life_cycles:
                raise CodecError(
                    f"pool group {group.pool_group_index} has no life cycle: leave it out"
                )
            shape = _PageShape(
                hot_base=np.array([p.base_address for p in group.pools], np.int64),
                hot_stride=sizes,
                cold_offset=np.cumsum(sizes) - sizes,
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
        page_indices: PageIndexPairs,
        stream: Stream,
    ) -> None:
        shape = self._shape(life_cycle_id)
        cold = self._cold_addresses(shape, dst_base, page_indices["dst"])
        hot = self._hot_addresses(shape, page_indices["src"])
        stream.copy(cold, hot, self._sizes(shape, page_indices.size))

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndexPairs,
        stream: Stream,
    ) -> None:
        shape = self._shape(life_cycle_id)
        cold = self._cold_addresses(shape, src_base, page_indices["src"])
        hot = self._hot_addresses(shape, page_indices["dst"])
        stream.copy(hot, cold, self._sizes(shape, page_indices.size))

    def _shape(self, life_cycle_id: LifeCycleId) -> _PageShape:
        try:
            return self._shapes[life_cycle_id]
        except KeyError:
            raise UsageError(
                f"codec {self.codec_id} does not know life cycle {life_cycle_id}: "
                "configure it with its pool group first"
            ) from None

    @staticmethod
    def _cold_addresses(shape: _PageShape, base: int, indices: Int64Array) -> Int64Array:
        pages = indices.astype(np.int64) * shape.cold_page_bytes + base
        return (pages[:, None] + shape.cold_offset).ravel()

    @staticmethod
    def _hot_addresses(shape: _PageShape, indices: Int64Array) -> Int64Array:
        return (indices.astype(np.int64)[:, None] * shape.hot_stride + shape.hot_base).ravel()

    @staticmethod
    def _sizes(shape: _PageShape, num_pages: int) -> Int64Array:
        return np.tile(shape.hot_stride, num_pages)


def create_default_cold_page_codec() -> ColdPageCodec:
    """A new concatenating codec. A manager makes its own when none is given; this one is for codec
    authors.
    """
    return _ConcatCodec()
