"""The lossless default: a cold page is the page's pool contributions one after another.

The device copies the pages of small contributions itself, by index pairs in its memory; larger ones
are single copies, which the host lists. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpage.codecs.base import BlockOrdinals, ColdPageCodec, PageIndices, PoolGroupDesc
from coldpage.device.base import PageParts, Stream
from coldpage.errors import CodecError, UsageError
from coldpage.types import (
    DeviceArray,
    Int32Array,
    Int64Array,
    LifeCycleId,
    MemAddress,
    PageIndexLocation,
)

__all__ = ["create_default_cold_page_codec"]


@dataclass(frozen=True, slots=True)
class _PageShape:
    """One pool group as columns over its pools [num_pools, 1].

    Descriptors come pool by pool: numpy's inner loop then runs over pages, not over the few pools.
    """

    hot_base: Int64Array
    hot_stride: Int64Array
    cold_offset: Int64Array
    cold_stride: Int64Array
    representative: LifeCycleId
    location: PageIndexLocation

    @property
    def cold_page_bytes(self) -> int:
        return int(self.cold_stride[0, 0])

    def parts(self, cold_base: MemAddress, *, is_encode: bool) -> PageParts:
        """The pools' parts of a page, on the way to the cold pages at ``cold_base`` or back."""
        hot = self.hot_base.reshape(-1), self.hot_stride.reshape(-1)
        cold = (self.cold_offset + cold_base).reshape(-1), self.cold_stride.reshape(-1)
        dst, src = (cold, hot) if is_encode else (hot, cold)
        return PageParts(*dst, *src, self.hot_stride.reshape(-1))


class _Descriptors:
    """Arrays that one call after another fills, since streams consume them at once. New ones of
    megabytes would cost ten times what filling them does, in page faults.
    """

    def __init__(self) -> None:
        self._rows: Int64Array = np.empty((3, 0), np.int64)

    def fill(
        self, shape: _PageShape, slots: Int32Array, cold_base: MemAddress, indices: Int32Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Hot and cold addresses and sizes of every pool's part of the pages, each [num_pools *
        num_pages]. Valid until the next call.
        """
        num_pools, num_pages = shape.hot_stride.size, slots.size
        num_parts = num_pools * num_pages
        if num_parts > self._rows.shape[1]:
            self._rows = np.empty((3, num_parts), np.int64)
        hot, cold, sizes = (row[:num_parts].reshape(num_pools, num_pages) for row in self._rows)
        np.multiply(slots, shape.hot_stride, out=hot)
        hot += shape.hot_base
        np.multiply(indices, shape.cold_stride, out=cold)
        cold += shape.cold_offset + cold_base
        sizes[:] = shape.hot_stride
        return hot.reshape(-1), cold.reshape(-1), sizes.reshape(-1)


class _ConcatCodec(ColdPageCodec):
    """One submission a call: a copy of pages, or a batch of one descriptor a page and pool."""

    codec_id = "concat"
    is_lossless = True

    def __init__(self, max_page_kernel_bytes: int) -> None:
        self._max_page_kernel_bytes = max_page_kernel_bytes
        self._shapes: dict[LifeCycleId, _PageShape] = {}
        self._descriptors = _Descriptors()

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        for group in pool_groups:
            sizes = np.array([[p.slot_bytes] for p in group.pools], np.int64)
            if not group.life_cycles:
                raise CodecError(
                    f"pool group {group.pool_group_index} has no life cycle: leave it out"
                )
            is_small = int(sizes.max()) <= self._max_page_kernel_bytes
            shape = _PageShape(
                hot_base=np.array([[p.base_address] for p in group.pools], np.int64),
                hot_stride=sizes,
                cold_offset=np.cumsum(sizes, axis=0) - sizes,
                cold_stride=np.full_like(sizes, sizes.sum()),
                representative=min(lc.life_cycle_id for lc in group.life_cycles),
                location=PageIndexLocation.DEVICE if is_small else PageIndexLocation.HOST,
            )
            for life_cycle in group.life_cycles:
                self._shapes[life_cycle.life_cycle_id] = shape

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        return self._shape(life_cycle_id).cold_page_bytes

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        return self._shape(life_cycle_id).representative

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        return self._shape(life_cycle_id).location

    def prepare(self, stream: Stream) -> None:
        """Let the device get ready for the copies that it makes itself."""
        for shape in {id(shape): shape for shape in self._shapes.values()}.values():
            if shape.location is PageIndexLocation.DEVICE:
                anywhere = MemAddress(int(shape.hot_base[0, 0]))
                for is_encode in (True, False):
                    parts = shape.parts(anywhere, is_encode=is_encode)
                    stream.copy_pages(parts, DeviceArray(anywhere, 0))

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        shape = self._shape(life_cycle_id)
        if isinstance(page_indices, DeviceArray):
            stream.copy_pages(shape.parts(dst_base, is_encode=True), page_indices)
            return
        hot, cold, sizes = self._descriptors.fill(
            shape, page_indices["src"], dst_base, page_indices["dst"]
        )
        stream.copy(cold, hot, sizes)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        shape = self._shape(life_cycle_id)
        if isinstance(page_indices, DeviceArray):
            stream.copy_pages(shape.parts(src_base, is_encode=False), page_indices)
            return
        hot, cold, sizes = self._descriptors.fill(
            shape, page_indices["dst"], src_base, page_indices["src"]
        )
        stream.copy(hot, cold, sizes)

    def _shape(self, life_cycle_id: LifeCycleId) -> _PageShape:
        try:
            return self._shapes[life_cycle_id]
        except KeyError:
            raise UsageError(
                f"codec {self.codec_id} does not know life cycle {life_cycle_id}: "
                "configure it with its pool group first"
            ) from None


def create_default_cold_page_codec(max_page_kernel_bytes: int = 0) -> ColdPageCodec:
    """A new concatenating codec. A manager makes its own when none is given; this one is for codec
    authors.

    The device copies pages itself where no pool has more than ``max_page_kernel_bytes`` of one, as
    its ``max_page_kernel_bytes`` advises. Cold pages do not depend on it.
    """
    return _ConcatCodec(max_page_kernel_bytes)
