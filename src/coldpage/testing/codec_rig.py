"""What a codec is tried on: hot pools, cold areas, index arrays, and an eye on every byte."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from coldpage.codecs.base import (
    BlockOrdinals,
    ColdPageCodec,
    LifeCycleDesc,
    PageIndices,
    PoolDesc,
    PoolGroupDesc,
)
from coldpage.codecs.configured import ConfiguredCodec
from coldpage.device.base import Device, Memory, MemoryKind
from coldpage.device.simulated import SimulatedDevice
from coldpage.testing.hot_shapes import HotGroupShape
from coldpage.testing.memory_access import allocate_ready, read_memory, write_memory
from coldpage.testing.watched_stream import WatchedStream
from coldpage.types import (
    PAGE_INDEX_PAIR,
    DeviceArray,
    LayerGroupId,
    LifeCycleId,
    MemAddress,
    PageClass,
    PageIndexLocation,
    PoolGroupIndex,
    PoolIndex,
)

__all__ = [
    "NUM_SLOTS",
    "CodecRig",
    "ColdArea",
    "HotGroupShape",
    "Indices",
    "Snapshot",
]

NUM_SLOTS: Final = 24  # of each hot pool, and of each cold area

# Around the slots; a multiple of every alignment that a codec may rely on.
_GUARD_BYTES: Final = 4096

# A codec that blocks is found after this long.
_HELD_S: Final = 2.0

_PAIR_BYTES: Final = PAGE_INDEX_PAIR.itemsize
_ORDINAL_BYTES: Final = 4
_INDEX_ROOM_BYTES: Final = 16 * 1024

_Bytes = npt.NDArray[np.uint8]
_Item = TypeVar("_Item", bound=np.generic)
Indices = Sequence[int] | npt.NDArray[np.integer]

# The bytes of every memory at some time.
Snapshot = Mapping[MemAddress, _Bytes]


@dataclass(frozen=True, slots=True)
class ColdArea:
    """NUM_SLOTS cold pages with guards around them."""

    memory: Memory
    page_bytes: int

    @property
    def base(self) -> MemAddress:
        """Of the first page."""
        return MemAddress(self.memory.address + _GUARD_BYTES)

    @property
    def pages(self) -> _Bytes:
        """All pages, [NUM_SLOTS, page_bytes]."""
        return _inner(self.memory.array).reshape(NUM_SLOTS, self.page_bytes)


class CodecRig:
    """A configured codec with pools full of ``contents``, on one device, with one stream.

    Layer group ``g`` of ``n`` classes has the life cycles from ``n * g`` on: of sinks where there
    are any, of the body, and of recent blocks where there are any. Index pairs and ordinals are
    overwritten as soon as the contract allows it.
    """

    def __init__(
        self,
        codec: ColdPageCodec,
        device: Device,
        shapes: Sequence[HotGroupShape],
        contents: Callable[[np.random.Generator, int], _Bytes],
        *,
        has_sinks: bool,
        has_recent: bool = False,
    ) -> None:
        self.device = device
        self._contents = contents
        self._rng = np.random.default_rng(3)
        self._memories: list[Memory] = []
        self._index_room: list[tuple[MemAddress, int]] = []  # zeros that nobody has had yet
        self._slots: list[Memory] = []  # pools and areas, with guards
        self._streams: list[WatchedStream] = []
        self.stream = self.new_stream()
        self.pools = [
            [self._allocate_slots(size, MemoryKind.DEVICE) for size in shape.pool_bytes]
            for shape in shapes
        ]
        self._shapes = shapes
        self._codec = codec
        self._classes = (
            *((PageClass.SINK,) if has_sinks else ()),
            PageClass.BODY,
            *((PageClass.RECENT,) if has_recent else ()),
        )
        self.groups = [self._describe(index) for index in range(len(shapes))]
        described = [lc for group in self.groups for lc in group.life_cycles]
        self.life_cycles = sorted(described, key=lambda lc: lc.life_cycle_id)
        self.hot_group_of = {
            lc.life_cycle_id: group.pool_group_index
            for group in self.groups
            for lc in group.life_cycles
        }
        for group in range(len(shapes)):
            self.refill(group)
        self.configured = ConfiguredCodec(codec, self.groups)
        codec.prepare(self.stream.inner)

    # Memory

    def _allocate(self, num_bytes: int, kind: MemoryKind) -> Memory:
        memory = allocate_ready(self.device, num_bytes, kind)
        self._memories.append(memory)
        return memory

    def _allocate_slots(self, slot_bytes: int, kind: MemoryKind) -> Memory:
        memory = self._allocate(slot_bytes * NUM_SLOTS + 2 * _GUARD_BYTES, kind)
        junk = self._rng.integers(0, 256, memory.num_bytes, np.uint8)
        write_memory(self.device, memory, junk)
        self._slots.append(memory)
        return memory

    def new_area(self, life_cycle_id: LifeCycleId) -> ColdArea:
        """Room for cold pages of the life cycle, full of junk."""
        page_bytes = self.configured.cold_page_bytes[life_cycle_id]
        return ColdArea(self._allocate_slots(page_bytes, MemoryKind.PINNED), page_bytes)

    def refill(self, group: int) -> None:
        """New contents for every hot page of a pool group. Nothing may be in flight."""
        for memory in self.pools[group]:
            contents = self._contents(self._rng, memory.num_bytes - 2 * _GUARD_BYTES)
            write_memory(self.device, memory, contents, _GUARD_BYTES)

    def load(self, life_cycle_id: LifeCycleId, slots: Indices) -> _Bytes:
        """Copies of hot pages, [num_pages, page_bytes], the pools one after another."""
        pools = self.pools[self.hot_group_of[life_cycle_id]]
        where = np.asarray(slots, np.int64)
        return np.concatenate([self._rows(memory)[where] for memory in pools], axis=1)

    def store(self, life_cycle_id: LifeCycleId, slots: Indices, pages: _Bytes) -> None:
        """Write hot pages."""
        start = 0
        for memory in self.pools[self.hot_group_of[life_cycle_id]]:
            rows = self._rows(memory)
            rows[np.asarray(slots, np.int64)] = pages[:, start : start + rows.shape[1]]
            write_memory(self.device, memory, rows.reshape(-1), _GUARD_BYTES)
            start += rows.shape[1]

    def _rows(self, memory: Memory) -> _Bytes:
        """A copy of the slots, [NUM_SLOTS, slot_bytes]."""
        return _inner(read_memory(self.device, memory)).reshape(NUM_SLOTS, -1)

    def snapshot(self) -> Snapshot:
        """The bytes of all pools, areas and guards."""
        return {memory.address: read_memory(self.device, memory) for memory in self._slots}

    def check_only_cold_changed(self, before: Snapshot, area: ColdArea, indices: Indices) -> None:
        """Assert that all bytes are as before, except in these cold pages."""
        self._check_rest(before, {area.memory.address: np.asarray(indices, np.int64)})

    def check_only_hot_changed(
        self, before: Snapshot, life_cycle_id: LifeCycleId, slots: Indices
    ) -> None:
        """Assert that all bytes are as before, except in these hot slots."""
        pools = self.pools[self.hot_group_of[life_cycle_id]]
        self._check_rest(before, {m.address: np.asarray(slots, np.int64) for m in pools})

    def check_nothing_changed(self, before: Snapshot) -> None:
        """Assert that all bytes are as before."""
        self._check_rest(before, {})

    def _check_rest(
        self, before: Snapshot, changed: Mapping[MemAddress, npt.NDArray[np.int64]]
    ) -> None:
        for memory in self._slots:
            if memory.address not in before:
                continue
            differs = read_memory(self.device, memory) != before[memory.address]
            slots = changed.get(memory.address)
            if slots is not None:
                _inner(differs).reshape(NUM_SLOTS, -1)[slots] = False
            where = np.flatnonzero(differs)
            assert not where.size, (
                f"the codec changes {where.size} bytes that are not its own, the first at "
                f"{memory.address + int(where[0]):#x}, {int(where[0]) - _GUARD_BYTES} bytes after "
                "the first slot"
            )

    # Calls

    def new_stream(self) -> WatchedStream:
        """Another stream of the device."""
        inner = self.device.create_stream(f"codec{len(self._streams)}")
        isolates = isinstance(self.device, SimulatedDevice)
        stream = WatchedStream(inner, self._memories, isolates=isolates)
        self._streams.append(stream)
        return stream

    def ordinals(self, life_cycle_id: LifeCycleId, num_pages: int) -> npt.NDArray[np.int32]:
        """Block ordinals that pages of the life cycle may have."""
        if self.life_cycles[life_cycle_id].page_class is PageClass.SINK:
            return np.zeros(num_pages, np.int32)
        return self._rng.integers(1, 1 << 20, num_pages).astype(np.int32)

    def encode(
        self,
        life_cycle_id: LifeCycleId,
        area: ColdArea,
        indices: Indices,
        slots: Indices,
        ordinals: npt.NDArray[np.int32],
        stream: WatchedStream | None = None,
    ) -> None:
        """Enqueue hot ``slots`` -> cold pages ``indices`` of ``area``."""
        with self._lend(life_cycle_id, _pairs(indices, slots), ordinals, stream) as lent:
            self._codec.encode(life_cycle_id, area.base, lent.pairs, lent.stream, lent.ordinals)

    def decode(
        self,
        life_cycle_id: LifeCycleId,
        area: ColdArea,
        slots: Indices,
        indices: Indices,
        ordinals: npt.NDArray[np.int32],
        stream: WatchedStream | None = None,
    ) -> None:
        """Enqueue cold pages ``indices`` of ``area`` -> hot ``slots``."""
        with self._lend(life_cycle_id, _pairs(slots, indices), ordinals, stream) as lent:
            self._codec.decode(life_cycle_id, area.base, lent.pairs, lent.stream, lent.ordinals)

    @contextlib.contextmanager
    def _lend(
        self,
        life_cycle_id: LifeCycleId,
        pairs: npt.NDArray[np.void],
        ordinals: npt.NDArray[np.int32],
        stream: WatchedStream | None,
    ) -> Iterator[_Lent]:
        stream = self.stream if stream is None else stream
        wanted = ordinals.copy() if self._codec.needs_positions else None
        is_on_host = self.configured.locations[life_cycle_id] is PageIndexLocation.HOST
        lent = _Lent(stream, pairs, wanted) if is_on_host else self._upload(stream, pairs, wanted)
        stream.is_in_codec_call = True
        try:
            yield lent
        finally:
            stream.is_in_codec_call = False
            if is_on_host:
                pairs[...] = np.zeros((), pairs.dtype)
                if wanted is not None:
                    wanted[:] = 0
            else:
                for array, size in ((lent.pairs, _PAIR_BYTES), (lent.ordinals, _ORDINAL_BYTES)):
                    self._overwrite(stream, array, size)

    def _upload(
        self,
        stream: WatchedStream,
        pairs: npt.NDArray[np.void],
        ordinals: npt.NDArray[np.int32] | None,
    ) -> _Lent:
        def upload(array: npt.NDArray[np.generic]) -> DeviceArray:
            address = self._take_index_room(array.nbytes)
            if array.size:
                stream.inner.upload(address, np.frombuffer(array.tobytes(), np.uint8))
            return DeviceArray(address, array.size, array)

        return _Lent(stream, upload(pairs), None if ordinals is None else upload(ordinals))

    def _take_index_room(self, num_bytes: int) -> MemAddress:
        """Device memory with zeros, for once."""
        self._make_index_room(num_bytes)
        address, num_left = self._index_room.pop()
        used = -(-num_bytes // _PAIR_BYTES) * _PAIR_BYTES
        self._index_room.append((MemAddress(address + used), num_left - used))
        return address

    def _make_index_room(self, num_bytes: int) -> None:
        if not self._index_room or self._index_room[-1][1] < num_bytes:
            memory = self._allocate(max(_INDEX_ROOM_BYTES, num_bytes), MemoryKind.DEVICE)
            write_memory(self.device, memory, 0)
            self._index_room = [(memory.address, memory.num_bytes)]

    def _overwrite(
        self, stream: WatchedStream, array: PageIndices | BlockOrdinals | None, item_bytes: int
    ) -> None:
        """What the host has of it now; the rest as soon as what was enqueued so far is done, and
        not earlier.
        """
        if isinstance(array, DeviceArray) and array.size:
            assert array.host is not None
            array.host[...] = np.zeros((), array.host.dtype)
            stream.inner.upload(array.address, np.zeros(array.size * item_bytes, np.uint8))

    def finish(self, stream: WatchedStream | None = None) -> None:
        """Wait for one stream only, and see what the codec did with it."""
        (self.stream if stream is None else stream).synchronize()
        self.check_findings()

    def check_findings(self) -> None:
        """Assert that no stream and no device has anything to say against the codec."""
        findings = [finding for stream in self._streams for finding in stream.findings]
        if isinstance(self.device, SimulatedDevice):
            findings += [str(violation) for violation in self.device.violations]
        assert not findings, "\n".join(findings)

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Nothing that is enqueued on the stream runs before the end. Yields a check that the codec
        has not waited for it either.
        """
        # Before anything is held: a device may wait for all streams when it makes memory.
        self._make_index_room(_INDEX_ROOM_BYTES // 2)
        before = self.snapshot()
        gate = threading.Event()
        was_early: list[bool] = []
        device = self.device
        if isinstance(device, SimulatedDevice):
            num_executed = device.counts.executed_ops
        else:
            self.stream.inner.launch(
                lambda: was_early.append(not gate.wait(_HELD_S)), reads=(), writes=()
            )

        def check() -> None:
            if isinstance(device, SimulatedDevice):
                assert device.counts.executed_ops == num_executed, "the codec waits for its work"
            assert True not in was_early, "the codec waits for its work"
            self.check_nothing_changed(before)

        try:
            yield check
        finally:
            gate.set()

    def close(self) -> None:
        """Finish everything, close the codec and free the memory."""
        try:
            for stream in self._streams:
                stream.synchronize()
            self._codec.close()
            for memory in self._memories:
                memory.free()
        finally:
            self.device.close()
        self.check_findings()

    def _describe(self, index: int) -> PoolGroupDesc:
        shape, memories = self._shapes[index], self.pools[index]
        pools = tuple(
            PoolDesc(PoolIndex(pool), MemAddress(memory.address + _GUARD_BYTES), size)
            for pool, (memory, size) in enumerate(zip(memories, shape.pool_bytes, strict=True))
        )
        life_cycles = tuple(
            LifeCycleDesc(
                LifeCycleId(len(self._classes) * group + number),
                LayerGroupId(group),
                page_class,
                shape.describe_buffers(group),
            )
            for group in shape.layer_groups
            for number, page_class in enumerate(self._classes)
        )
        return PoolGroupDesc(PoolGroupIndex(index), NUM_SLOTS, pools, life_cycles)


@dataclass(frozen=True, slots=True)
class _Lent:
    """What a codec call is given."""

    stream: WatchedStream
    pairs: PageIndices
    ordinals: BlockOrdinals | None


def _inner(array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    """What lies between the guards."""
    return array[_GUARD_BYTES:-_GUARD_BYTES]


def _pairs(dst: Indices, src: Indices) -> npt.NDArray[np.void]:
    pairs = np.empty(len(dst), PAGE_INDEX_PAIR)
    pairs["dst"], pairs["src"] = dst, src
    return pairs
