"""Scattered pages through a codec, as a manager's moves call it."""

from __future__ import annotations

import enum
from time import perf_counter
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.bench.arena import Arena, Direction
from coldpage.codecs import (
    BufferDesc,
    ColdPageCodec,
    LifeCycleDesc,
    PoolDesc,
    PoolGroupDesc,
    close_codec,
    configure_taken,
    create_default_cold_page_codec,
)
from coldpage.device.base import Device, Event, Stream
from coldpage.errors import DeviceError
from coldpage.migration.codec_calls import MAX_INDEX_BATCH_BYTES, CodecCalls
from coldpage.types import (
    PAGE_INDEX_PAIR,
    Int32Array,
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = ["MovePath", "PageMoves"]

_LIFE_CYCLE: Final = LifeCycleId(0)
# As many pages as one batch of indices in device memory names.
_CALL_PAGES: Final = MAX_INDEX_BATCH_BYTES // PAGE_INDEX_PAIR.itemsize
# Both ways at once, calls alternate, each so large that neither stream runs dry meanwhile.
_TURN_BYTES: Final = 64 << 20
_MIN_TURN_PAGES: Final = 8
_CHECKED_PAGES: Final = 64
_MAX_ORDINAL: Final = 2048  # of blocks, for codecs that want to know


class MovePath(enum.Enum):
    """How pages are copied."""

    AUTO = "auto"  # as the device advises for the size
    DRIVER = "driver"  # batches of single copies
    KERNEL = "kernel"  # the device copies pages by index pairs

    def codec(self, device: Device) -> ColdPageCodec:
        """A lossless codec that copies so."""
        max_bytes = {MovePath.DRIVER: 0, MovePath.KERNEL: 1 << 62}
        return create_default_cold_page_codec(max_bytes.get(self, device.max_page_kernel_bytes))


class PageMoves:
    """Pages of one part a pool, ``segments`` bytes each, at random places on both sides, with
    ``buffers`` that a codec may want to know.

    Offload and onboard never touch the same slots, so they may run at once.
    """

    def __init__(
        self,
        arena: Arena,
        segments: tuple[int, ...],
        codec: ColdPageCodec,
        buffers: tuple[BufferDesc, ...] = (),
    ) -> None:
        self._arena = arena
        page_bytes = sum(segments)
        self.num_pages = arena.num_bytes // page_bytes
        self.num_bytes = self.num_pages * page_bytes
        description = self._describe(segments, buffers)
        self._codec = configure_taken(codec, [description])
        self._codec.codec.prepare(arena.onboard_stream)
        self.num_cold_bytes = self.num_pages * self._codec.cold_page_bytes[_LIFE_CYCLE]
        is_kernel = self._codec.locations[_LIFE_CYCLE] is PageIndexLocation.DEVICE
        self.path = MovePath.KERNEL if is_kernel else MovePath.DRIVER
        self._calls = CodecCalls(arena.device, [self._codec])
        random = np.random.default_rng(0)
        self._hot, self._cold = (
            random.permutation(2 * self.num_pages).astype(np.int32) for _ in range(2)
        )
        turn_pages = _TURN_BYTES // self._codec.cold_page_bytes[_LIFE_CYCLE]
        self._turn_pages = min(max(turn_pages, _MIN_TURN_PAGES), _CALL_PAGES)

    def _describe(
        self, segments: tuple[int, ...], buffers: tuple[BufferDesc, ...]
    ) -> PoolGroupDesc:
        num_slots, address = 2 * self.num_pages, int(self._arena.hot.address)
        pools = []
        for index, size in enumerate(segments):
            pools.append(PoolDesc(PoolIndex(index), MemAddress(address), size))
            address = -(-(address + num_slots * size) // 4096) * 4096
        last = self._arena.hot.address + self._arena.hot.num_bytes
        assert address <= last, "the pools fit the arena"
        life_cycle = LifeCycleDesc(_LIFE_CYCLE, LayerGroupId(0), PageClass.BODY, buffers)
        return PoolGroupDesc(PoolGroupIndex(0), num_slots, tuple(pools), (life_cycle,))

    # ------------------------------------------------------------------ what is timed

    def move(self, direction: Direction) -> None:
        """Enqueue the pages of a direction."""
        n = self.num_pages
        if direction == "both":
            for start in range(0, n, self._turn_pages):
                self._offload(start, min(start + self._turn_pages, n))
                self._onboard(start, min(start + self._turn_pages, n))
            return
        move = self._offload if direction == "down" else self._onboard
        for start in range(0, n, _CALL_PAGES):
            move(start, min(start + _CALL_PAGES, n))

    def round_bytes(self, direction: Direction = "both") -> int:
        """Hot bytes that ``start_round`` moves."""
        page_bytes = self.num_bytes // self.num_pages
        num_ways = 2 if direction == "both" else 1
        return num_ways * page_bytes * min(self._turn_pages, self.num_pages)

    def start_round(self, direction: Direction = "both") -> tuple[Event, ...]:
        """Enqueue one turn of pages each way that the direction has; the events of their ends."""
        num_pages = min(self._turn_pages, self.num_pages)
        ends: list[Event] = []
        if direction != "up":
            self._offload(0, num_pages)
            ends.append(self._arena.offload_stream.record())
        if direction != "down":
            self._onboard(0, num_pages)
            ends.append(self._arena.onboard_stream.record())
        return tuple(ends)

    def call_ms(self, direction: Direction, num_pages: int) -> float:
        """How long one call keeps the thread that makes it."""
        self._arena.synchronize()
        move = self._offload if direction == "down" else self._onboard
        started = perf_counter()
        move(0, num_pages)
        spent_ms = 1e3 * (perf_counter() - started)
        self._arena.synchronize()
        return spent_ms

    def _offload(self, start: int, stop: int) -> None:
        stream = self._arena.offload_stream
        self._encode(self._cold[start:stop], self._hot[start:stop], stream)

    def _onboard(self, start: int, stop: int) -> None:
        n, stream = self.num_pages, self._arena.onboard_stream
        self._decode(self._hot[n + start : n + stop], self._cold[n + start : n + stop], stream)

    def _encode(self, cold: Int32Array, hot: Int32Array, stream: Stream) -> None:
        base, ordinals = self._arena.cold.address, cold % _MAX_ORDINAL
        self._calls.encode(self._codec, _LIFE_CYCLE, base, cold, hot, ordinals, stream)

    def _decode(self, hot: Int32Array, cold: Int32Array, stream: Stream) -> None:
        base, ordinals = self._arena.cold.address, cold % _MAX_ORDINAL
        self._calls.decode(self._codec, _LIFE_CYCLE, base, hot, cold, ordinals, stream)

    # ------------------------------------------------------------------ around it

    def check(self) -> None:
        """Bring some pages up and down again through a lossless codec, and compare. Raises
        DeviceError.
        """
        n, page_bytes = min(self.num_pages, _CHECKED_PAGES), self.num_bytes // self.num_pages
        pages = self._arena.cold.array[: 2 * self.num_bytes].reshape(-1, page_bytes)
        source, target = self._cold[-n:], self._cold[:n]
        pages[source] = np.random.default_rng(1).integers(0, 256, (n, page_bytes), np.uint8)
        stream = self._arena.onboard_stream
        self._decode(self._hot[-n:], source, stream)
        self._encode(target, self._hot[-n:], stream)
        stream.synchronize()
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        num_wrong = sum(not np.array_equal(pages[a], pages[b]) for a, b in pairs)
        if num_wrong:
            raise DeviceError(f"{num_wrong} of {n} pages of {page_bytes} bytes came back changed")

    def fill(self, page: npt.NDArray[np.uint16]) -> None:
        """Write a page to every slot, and a cold page of it to every place."""
        stream = self._arena.onboard_stream
        for slot in range(2 * self.num_pages):
            address = MemAddress(self._arena.hot.address + slot * page.nbytes)
            stream.upload(address, page.view(np.uint8))
        self._encode_all()

    def _encode_all(self) -> None:
        stream = self._arena.onboard_stream
        for start in range(0, 2 * self.num_pages, _CALL_PAGES):
            some = slice(start, start + _CALL_PAGES)
            self._encode(self._cold[some], self._hot[some], stream)
        stream.synchronize()

    def error_of(self, page: npt.NDArray[np.uint16]) -> float:
        """How far a page of bfloat16 numbers, of which all slots are full, comes back from what it
        was, as a part of its length.
        """
        stream, hot, cold = self._arena.onboard_stream, self._arena.hot, self._arena.cold
        page_bytes = page.nbytes
        n = min(self.num_pages, _CHECKED_PAGES)
        slots, others = self._hot[:n], self._hot[n : 2 * n]
        blobs = self._cold[:n]
        self._encode(blobs, slots, stream)
        self._decode(others, blobs, stream)
        # Over cold pages, which are made again afterwards.
        to = cold.address + np.arange(n, dtype=np.int64) * page_bytes
        source = hot.address + others.astype(np.int64) * page_bytes
        stream.copy(to, source, np.full_like(to, page_bytes))
        stream.synchronize()
        restored = cold.array[: n * page_bytes].view(np.uint16).reshape(n, -1)
        was = _floats(page)
        errors = [np.linalg.norm(_floats(row) - was) for row in restored]
        self._encode_all()
        return float(max(errors) / np.linalg.norm(was))

    def close(self) -> None:
        """Let go of the codec. Nothing is in flight afterwards."""
        self._arena.synchronize()
        self._calls.close()
        close_codec(self._codec.codec)


def _floats(numbers: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Of bfloat16."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)
