"""Hot pools on a device, cold pages in pinned memory, and the default codec between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coldpage.codecs import (
    ConfiguredCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
    create_default_cold_page_codec,
)
from coldpage.device.base import Device, Memory, MemoryKind, Stream
from coldpage.migration.codec_calls import CodecCalls
from coldpage.testing.memory_access import allocate_ready, read_memory, write_memory
from coldpage.types import (
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = ["PATHS", "Bytes", "PageRig"]

Bytes = npt.NDArray[np.uint8]

# Which parts of pages a kernel copies, in bytes.
PATHS = {"driver": 0, "kernel": 1 << 40}

_LIFE_CYCLE = LifeCycleId(0)


class PageRig:
    """One life cycle with ``num_slots`` pages on each side. Everything begins ``offset_bytes``
    after an address that is aligned.
    """

    def __init__(
        self,
        device: Device,
        path: str,
        slot_bytes: Sequence[int],
        num_slots: int,
        offset_bytes: int = 0,
    ) -> None:
        self.device = device
        self.num_slots = num_slots
        self.page_bytes = sum(slot_bytes)
        self.stream = device.create_stream("pages")
        self._offset = offset_bytes
        self.pools = [
            allocate_ready(device, offset_bytes + size * num_slots, MemoryKind.DEVICE)
            for size in slot_bytes
        ]
        cold_bytes = offset_bytes + self.page_bytes * num_slots
        self.cold = allocate_ready(device, cold_bytes, MemoryKind.PINNED)
        self.codec = ConfiguredCodec(
            create_default_cold_page_codec(PATHS[path]), [self._describe(slot_bytes)]
        )
        wanted = PageIndexLocation.DEVICE if path == "kernel" else PageIndexLocation.HOST
        assert self.codec.locations == (wanted,)
        self._calls = CodecCalls(device, [self.codec])

    def _describe(self, slot_bytes: Sequence[int]) -> PoolGroupDesc:
        pools = tuple(
            PoolDesc(PoolIndex(index), MemAddress(memory.address + self._offset), size)
            for index, (memory, size) in enumerate(zip(self.pools, slot_bytes, strict=True))
        )
        life_cycle = LifeCycleDesc(_LIFE_CYCLE, LayerGroupId(0), PageClass.BODY, ())
        return PoolGroupDesc(PoolGroupIndex(0), self.num_slots, pools, (life_cycle,))

    @property
    def cold_base(self) -> MemAddress:
        """Of the first cold page."""
        return MemAddress(self.cold.address + self._offset)

    @property
    def cold_pages(self) -> Bytes:
        """All cold pages, [num_slots, page_bytes]."""
        return self._rows(self.cold.array)

    def _rows(self, data: Bytes) -> Bytes:
        return data[self._offset :].reshape(self.num_slots, -1)

    def read_hot(self) -> list[Bytes]:
        """A copy of each pool, [num_slots, slot_bytes]."""
        return [self._rows(read_memory(self.device, memory)) for memory in self.pools]

    def fill_hot(self, seed: int) -> list[Bytes]:
        """Random bytes in each pool; what they are."""
        rng = np.random.default_rng(seed)
        for memory in self.pools:
            data = np.frombuffer(rng.bytes(memory.num_bytes), np.uint8)
            write_memory(self.device, memory, data)
        return self.read_hot()

    def encode(self, cold: npt.ArrayLike, hot: npt.ArrayLike, stream: Stream | None = None) -> None:
        """Enqueue hot slots -> cold pages."""
        dst, src = np.asarray(cold, np.int32), np.asarray(hot, np.int32)
        self._calls.encode(
            self.codec, _LIFE_CYCLE, self.cold_base, dst, src, dst, stream or self.stream
        )

    def decode(self, hot: npt.ArrayLike, cold: npt.ArrayLike, stream: Stream | None = None) -> None:
        """Enqueue cold pages -> hot slots."""
        dst, src = np.asarray(hot, np.int32), np.asarray(cold, np.int32)
        self._calls.decode(
            self.codec, _LIFE_CYCLE, self.cold_base, dst, src, dst, stream or self.stream
        )

    def check_round_trip(self, num_pages: int, seed: int = 0) -> None:
        """Scattered pages go out and come back to other slots; no other byte changes."""
        rng = np.random.default_rng(seed)
        hot, cold, back = (rng.permutation(self.num_slots)[:num_pages] for _ in range(3))
        original = self.fill_hot(seed)
        self.cold.array[:] = 0xCC
        self.encode(cold, hot)
        self.stream.synchronize()
        expected = np.full((self.num_slots, self.page_bytes), 0xCC, np.uint8)
        expected[cold] = np.concatenate([pool[hot] for pool in original], axis=1)
        _assert_equal(self.cold_pages, expected)
        del expected
        for memory in self.pools:
            write_memory(self.device, memory, 0x11)
        self.decode(back, cold)
        self.stream.synchronize()
        for pool, found in zip(original, self.read_hot(), strict=True):
            wanted = np.full_like(pool, 0x11)
            wanted[back] = pool[hot]
            _assert_equal(found, wanted)

    def close(self) -> None:
        """Free everything."""
        self.stream.synchronize()
        self._calls.close()
        memories: list[Memory] = [*self.pools, self.cold]
        for memory in memories:
            memory.free()


def _assert_equal(found: Bytes, expected: Bytes) -> None:
    if not np.array_equal(found, expected):
        rows = np.flatnonzero((found != expected).any(axis=1))
        raise AssertionError(f"{rows.size} of {len(found)} pages differ: {rows[:9].tolist()}")
