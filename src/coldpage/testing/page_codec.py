"""A base for codecs in numpy, on devices whose memory this process can reach: one launch a call."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.codecs.base import (
    BlockOrdinals,
    ColdPageCodec,
    LifeCycleDesc,
    PageIndices,
    PoolGroupDesc,
)
from coldpage.device.base import Stream
from coldpage.types import (
    PAGE_INDEX_PAIR,
    ByteRange,
    DeviceArray,
    Int64Array,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
)

__all__ = ["Bytes", "HotPages", "PageCodec", "Strided", "memory"]

Bytes = npt.NDArray[np.uint8]

# The bytes of the pages named.
_Ranges = Callable[[Int64Array], list[ByteRange]]

_ORDINAL_BYTES: Final = 4
_LOW_HALF: Final = np.uint64(0xFFFF_FFFF)
_HALF_BITS: Final = np.uint64(32)


def memory(address: int, num_bytes: int) -> Bytes:
    """The bytes at an address of this process, writable [num_bytes]; nothing keeps them alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


@dataclass(frozen=True, slots=True)
class Strided:
    """Equal pieces one after another: a hot pool, or the cold pages from some base on."""

    base: int
    piece_bytes: int

    def view(self, indices: Int64Array) -> Bytes:
        """The pieces up to the last one named, [num_pieces, piece_bytes]. There must be one."""
        num_pieces = int(indices.max()) + 1
        return memory(self.base, num_pieces * self.piece_bytes).reshape(num_pieces, -1)

    def ranges(self, indices: Int64Array) -> list[ByteRange]:
        """Exactly the bytes of the pieces named."""
        return [
            ByteRange(MemAddress(self.base + index * self.piece_bytes), self.piece_bytes)
            for index in indices.tolist()
        ]


@dataclass(frozen=True, slots=True)
class HotPages:
    """The hot pages of one life cycle, as rows in which the pools follow one another."""

    life_cycle: LifeCycleDesc
    pools: tuple[Strided, ...]
    alike: LifeCycleId  # the smallest life cycle of the same class in the same pool group
    first: LifeCycleId  # the smallest life cycle of the same pool group

    @classmethod
    def of_group(cls, group: PoolGroupDesc) -> list[HotPages]:
        """One for each life cycle of the group."""
        pools = tuple(Strided(pool.base_address, pool.slot_bytes) for pool in group.pools)
        first = min(lc.life_cycle_id for lc in group.life_cycles)
        alike: dict[PageClass, LifeCycleId] = {}
        for lc in sorted(group.life_cycles, key=lambda lc: lc.life_cycle_id):
            alike.setdefault(lc.page_class, lc.life_cycle_id)
        return [cls(lc, pools, alike[lc.page_class], first) for lc in group.life_cycles]

    @property
    def page_bytes(self) -> int:
        """Of one hot page over all its pools."""
        return sum(pool.piece_bytes for pool in self.pools)

    def load(self, slots: Int64Array) -> Bytes:
        """A copy of the pages in ``slots``, [num_pages, page_bytes]."""
        return np.concatenate([pool.view(slots)[slots] for pool in self.pools], axis=1)

    def store(self, slots: Int64Array, pages: Bytes) -> None:
        """Write ``pages`` [num_pages, page_bytes] to ``slots``."""
        start = 0
        for pool in self.pools:
            pool.view(slots)[slots] = pages[:, start : start + pool.piece_bytes]
            start += pool.piece_bytes

    def ranges(self, slots: Int64Array) -> list[ByteRange]:
        """Exactly the bytes of the pages in ``slots``."""
        return [part for pool in self.pools for part in pool.ranges(slots)]


class PageCodec(ColdPageCodec):
    """Hot rows to cold rows and back, by two functions of arrays that a subclass writes.

    Index pairs and ordinals that lie on the host are copied before the call returns; those in
    device memory are read when the work runs, and only then are its ranges known.
    """

    def __init__(self, location: PageIndexLocation = PageIndexLocation.HOST) -> None:
        self._location = location
        self._hot: dict[LifeCycleId, HotPages] = {}

    @abc.abstractmethod
    def cold_bytes(self, hot: HotPages) -> int:
        """The size of a cold page."""

    @abc.abstractmethod
    def to_cold(self, hot: HotPages, pages: Bytes, ordinals: Int64Array | None) -> Bytes:
        """Cold pages [num_pages, cold_bytes] from ``pages`` [num_pages, page_bytes]. Pure.

        ``ordinals`` [num_pages] of the blocks are None unless ``needs_positions``.
        """

    @abc.abstractmethod
    def to_hot(self, hot: HotPages, blobs: Bytes, ordinals: Int64Array | None) -> Bytes:
        """The inverse of ``to_cold``, or nearly so. Pure."""

    def representative(self, hot: HotPages) -> LifeCycleId:
        """Who stands for the pages that encode like these: all of the pool group."""
        return hot.first

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        """Remember where the pages lie."""
        for group in pool_groups:
            for hot in HotPages.of_group(group):
                self._hot[hot.life_cycle.life_cycle_id] = hot

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        """As ``cold_bytes`` says."""
        return self.cold_bytes(self._hot[life_cycle_id])

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        """As ``representative`` says."""
        return self.representative(self._hot[life_cycle_id])

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        """The one that the codec was made with."""
        return self._location

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        dst_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """Enqueue one work for all pages."""
        if not page_indices.size:
            return
        hot = self._hot[life_cycle_id]
        cold = Strided(dst_base, self.cold_bytes(hot))
        arrays = _Arrays(page_indices, block_ordinals)

        def work() -> None:
            dst, src = arrays.load_pairs()
            cold.view(dst)[dst] = self.to_cold(hot, hot.load(src), arrays.load_ordinals())

        arrays.launch(stream, work, reads=hot.ranges, writes=cold.ranges)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        src_base: MemAddress,
        page_indices: PageIndices,
        stream: Stream,
        block_ordinals: BlockOrdinals | None,
    ) -> None:
        """Enqueue one work for all pages."""
        if not page_indices.size:
            return
        hot = self._hot[life_cycle_id]
        cold = Strided(src_base, self.cold_bytes(hot))
        arrays = _Arrays(page_indices, block_ordinals)

        def work() -> None:
            dst, src = arrays.load_pairs()
            hot.store(dst, self.to_hot(hot, cold.view(src)[src], arrays.load_ordinals()))

        arrays.launch(stream, work, reads=cold.ranges, writes=hot.ranges)


class _Arrays:
    """Index pairs and ordinals: copied from the host now, or read from device memory later."""

    def __init__(self, pairs: PageIndices, ordinals: BlockOrdinals | None) -> None:
        self._pairs = _keep(pairs, PAGE_INDEX_PAIR.itemsize)
        self._ordinals = None if ordinals is None else _keep(ordinals, _ORDINAL_BYTES)

    def load_pairs(self) -> tuple[Int64Array, Int64Array]:
        """Destinations and sources, each fetched with its partner by one load of 64 bits."""
        words = _bytes_of(self._pairs).view("<u8")
        return (words & _LOW_HALF).astype(np.int64), (words >> _HALF_BITS).astype(np.int64)

    def load_ordinals(self) -> Int64Array | None:
        """The block ordinals, for a codec that needs positions."""
        if self._ordinals is None:
            return None
        return _bytes_of(self._ordinals).view("<i4").astype(np.int64)

    def launch(
        self, stream: Stream, work: Callable[[], None], *, reads: _Ranges, writes: _Ranges
    ) -> None:
        """Enqueue ``work``, which reads these arrays, the sources and writes the destinations."""
        arrays = [a for a in (self._pairs, self._ordinals) if isinstance(a, ByteRange)]

        def all_reads() -> list[ByteRange]:
            return [*arrays, *reads(self.load_pairs()[1])]

        def all_writes() -> list[ByteRange]:
            return writes(self.load_pairs()[0])

        if arrays:  # only the device knows the slots
            stream.launch(work, reads=all_reads, writes=all_writes)
        else:
            stream.launch(work, reads=all_reads(), writes=all_writes())


def _keep(array: PageIndices | BlockOrdinals, item_bytes: int) -> Bytes | ByteRange:
    if isinstance(array, DeviceArray):
        return ByteRange(array.address, array.size * item_bytes)
    return np.frombuffer(array.tobytes(), np.uint8)


def _bytes_of(kept: Bytes | ByteRange) -> Bytes:
    return memory(kept.address, kept.num_bytes) if isinstance(kept, ByteRange) else kept
