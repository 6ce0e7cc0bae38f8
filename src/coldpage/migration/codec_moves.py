"""Moves between the hot level and cold levels in memory: one codec call a batch, ordered by events.

The transaction: the caller has allocated every destination slot; the migration stream waits for the
ready events of sources and destinations; the codec enqueues; one finish event goes to both sides;
only then does a destination count as a copy. A rejected submission is fenced and leaves the pages
where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from coldpage.codecs.base import ColdPageCodec, PageIndexPairs
from coldpage.copy_engine import copy_slots
from coldpage.device.base import Device, Event, Stream
from coldpage.errors import SubmissionError
from coldpage.events import Counters
from coldpage.page import HOT_BIT, PageTable
from coldpage.pools import LevelPools, split_by
from coldpage.slots import ReadyEvents
from coldpage.staging import StagingBuffer
from coldpage.types import (
    HOT_LEVEL,
    PAGE_INDEX_PAIR,
    Int32Array,
    LifeCycleId,
)

__all__ = ["CodecMoves"]


def _pairs(dst: Int32Array, src: Int32Array) -> PageIndexPairs:
    pairs = np.empty(dst.size, PAGE_INDEX_PAIR)
    pairs["dst"] = dst
    pairs["src"] = src
    return pairs


class CodecMoves:
    """Encodes and decodes batches of pages on two streams of its own."""

    def __init__(
        self,
        device: Device,
        codec: ColdPageCodec,
        levels: Sequence[LevelPools],
        table: PageTable,
        counters: Counters,
    ) -> None:
        self.ready = ReadyEvents()
        self._codec = codec
        self._levels = levels
        self.hot_level = levels[HOT_LEVEL]
        self._table = table
        self._counters = counters
        num_life_cycles = self.hot_level.pool_group_of.size
        self.cold_page_bytes = [
            codec.query_cold_page_bytes(LifeCycleId(i)) for i in range(num_life_cycles)
        ]
        self._representative = np.array(
            [codec.get_batching_layer_group_id(LifeCycleId(i)) for i in range(num_life_cycles)],
            np.int16,
        )
        # After all that can fail: a stream ends with its device only.
        self.offload_stream = device.create_stream("offload")
        self.onboard_stream = device.create_stream("onboard")

    def batches(self, pages: Int32Array) -> Iterator[tuple[LifeCycleId, Int32Array]]:
        """The pages in batches that one codec call may take, with the life cycle that stands for
        each.

        Equal representatives share hot and cold pool groups, so the representative alone is the
        key.
        """
        keys = self._representative[self._table.life_cycle[pages]]
        for representative, batch in split_by(keys, pages):
            yield LifeCycleId(representative), batch

    def offload(self, pages: Int32Array, level: LevelPools) -> Int32Array:
        """Enqueue hot -> ``level`` (memory), into the slots that the pages have there already.

        Returns the pages whose submission was rejected: they are as before, without their slots
        there.
        """
        failed = [
            batch
            for representative, batch in self.batches(pages)
            if not self._move(representative, batch, level, to_hot=False)
        ]
        return np.concatenate(failed) if failed else pages[:0]

    def onboard(self, pages: Int32Array, level: LevelPools) -> Int32Array:
        """Enqueue ``level`` (memory) -> hot. As ``offload``, the other way."""
        failed = [
            batch
            for representative, batch in self.batches(pages)
            if not self._move(representative, batch, level, to_hot=True)
        ]
        return np.concatenate(failed) if failed else pages[:0]

    def _move(
        self, representative: LifeCycleId, pages: Int32Array, level: LevelPools, *, to_hot: bool
    ) -> bool:
        table = self._table
        hot_slots, cold_slots = table.slot[HOT_LEVEL, pages], table.slot[level.level, pages]
        hot_group = self.hot_level.allocators[self.hot_level.pool_group_of[representative]]
        cold_index = level.pool_group_of[representative]
        cold_group = level.allocators[cold_index]
        base = level.memory[cold_index][0].base_address
        stream = self.onboard_stream if to_hot else self.offload_stream
        self.ready.wait_on(stream, hot_group.event[hot_slots])
        self.ready.wait_on(stream, cold_group.event[cold_slots])
        accepted = True
        try:
            if to_hot:
                self._codec.decode(representative, base, _pairs(hot_slots, cold_slots), stream)
            else:
                self._codec.encode(representative, base, _pairs(cold_slots, hot_slots), stream)
        except SubmissionError:
            accepted = False
            self._counters.totals["rejected_submissions"] += 1
        # Also after a rejection: a codec may have enqueued a part before it failed.
        event_id = self.ready.register(stream.record())
        hot_group.event[hot_slots] = event_id
        cold_group.event[cold_slots] = event_id
        if accepted:
            table.present[pages] |= HOT_BIT if to_hot else level.bit
            num_bytes = self.cold_page_bytes[representative] * pages.size
            path = f"{level.name}-hot" if to_hot else f"hot-{level.name}"
            self._counters.count_move(path, int(pages.size), num_bytes)
        elif to_hot:
            hot_group.free(hot_slots)
        else:
            cold_group.free(cold_slots)
        return accepted

    def encode_staged(
        self, representative: LifeCycleId, pages: Int32Array, lease: StagingBuffer
    ) -> Event | None:
        """Enqueue hot -> staging, page ``i`` at the ``i``-th slice. The lease belongs to the
        offload stream.

        Returns the event of the encoded bytes, or None when the submission was rejected.
        """
        table, stream = self._table, self.offload_stream
        hot_slots = table.slot[HOT_LEVEL, pages]
        hot_group = self.hot_level.allocators[self.hot_level.pool_group_of[representative]]
        self.ready.wait_on(stream, hot_group.event[hot_slots])
        slices = np.arange(pages.size, dtype=np.int32)
        accepted = True
        try:
            self._codec.encode(representative, lease.address, _pairs(slices, hot_slots), stream)
        except SubmissionError:
            accepted = False
            self._counters.totals["rejected_submissions"] += 1
        event = stream.record()
        hot_group.event[hot_slots] = self.ready.register(event)
        return event if accepted else None

    def decode_staged(
        self,
        representative: LifeCycleId,
        pages: Int32Array,
        slices: Int32Array,
        lease: StagingBuffer,
    ) -> bool:
        """Enqueue staging -> hot for the verified ``slices``; the lease passes to the onboard
        stream.

        The pages' hot slots are allocated. Returns False when the submission was rejected.
        """
        stream = self.onboard_stream
        lease.set_stream(stream)
        hot_slots = self._table.slot[HOT_LEVEL, pages]
        hot_group = self.hot_level.allocators[self.hot_level.pool_group_of[representative]]
        self.ready.wait_on(stream, hot_group.event[hot_slots])
        accepted = True
        try:
            self._codec.decode(representative, lease.address, _pairs(hot_slots, slices), stream)
        except SubmissionError:
            accepted = False
            self._counters.totals["rejected_submissions"] += 1
        hot_group.event[hot_slots] = self.ready.register(stream.record())
        return accepted

    def copy_hot(self, src: Int32Array, dst: Int32Array) -> None:
        """Enqueue hot -> hot, ``dst[i] <- src[i]``, both in hot slots. Raises SubmissionError."""
        stream = self.onboard_stream
        keys = self.hot_level.pool_group_of[self._table.life_cycle[src]]
        for pool_group in np.unique(keys).tolist():
            group = self.hot_level.allocators[pool_group]
            pools = self.hot_level.memory[pool_group]
            src_slots = self._table.slot[HOT_LEVEL, src[keys == pool_group]]
            dst_slots = self._table.slot[HOT_LEVEL, dst[keys == pool_group]]
            self.ready.wait_on(stream, group.event[src_slots])
            self.ready.wait_on(stream, group.event[dst_slots])
            try:
                copy_slots(pools, dst_slots, pools, src_slots, stream)
            finally:
                event_id = self.ready.register(stream.record())
                group.event[src_slots] = event_id
                group.event[dst_slots] = event_id
        self._counters.totals["copied_on_write_pages"] += int(src.size)

    def order_after(self, pages: Int32Array, stream: Stream) -> None:
        """Make the pages' hot slots ready only after all work enqueued on ``stream`` so far (and
        before).
        """
        keys = self.hot_level.pool_group_of[self._table.life_cycle[pages]]
        groups = list(split_by(keys, pages))
        for pool_group, members in groups:
            slots = self._table.slot[HOT_LEVEL, members]
            # Another reader's event must not be forgotten: make the new event come after it.
            self.ready.wait_on(stream, self.hot_level.allocators[pool_group].event[slots])
        event_id = self.ready.register(stream.record())
        for pool_group, members in groups:
            slots = self._table.slot[HOT_LEVEL, members]
            self.hot_level.allocators[pool_group].event[slots] = event_id

    def outstanding(self, pages: Int32Array) -> list[Event]:
        """The distinct events that the pages' hot slots still wait for."""
        keys = self.hot_level.pool_group_of[self._table.life_cycle[pages]]
        events: list[Event] = []
        for pool_group, members in split_by(keys, pages):
            slots = self._table.slot[HOT_LEVEL, members]
            events += self.ready.outstanding(self.hot_level.allocators[pool_group].event[slots])
        return events

    def synchronize(self) -> None:
        """Block until everything enqueued here has completed."""
        self.offload_stream.synchronize()
        self.onboard_stream.synchronize()
