"""Moves between levels in memory, and the memory half of moves to disk: ordered by events.

The transaction: the caller has allocated every destination slot; the migration stream waits for the
ready events of sources and destinations; the work is enqueued; one finish event goes to both sides;
only then does a destination count as a copy. A rejected submission is fenced and leaves the pages
where they were; so does a codec that fails, and it is not asked again about the same copy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from coldpage.codecs import ConfiguredCodec
from coldpage.copy_engine import copy_slots
from coldpage.device.base import Device, Event, Stream
from coldpage.errors import SubmissionError
from coldpage.events import StorageEvents
from coldpage.migration.codec_calls import CodecCalls, CodecFailedError
from coldpage.migration.codec_failures import CodecFailures
from coldpage.page import PageTable
from coldpage.pools import LevelPools, PoolGroup, split_by
from coldpage.slots import ReadyEvents, SlotAllocator
from coldpage.staging import StagingBuffer
from coldpage.types import HOT_LEVEL, Int32Array, Int64Array, LifeCycleId, MemAddress

__all__ = ["NUM_SCRATCH_SLOTS", "CodecMoves", "Rejection"]

# Hot slots of each pool group set aside for pages that pass from one codec to another.
NUM_SCRATCH_SLOTS: Final = 4

# Slots of one pool group that a submission touches.
_Touched = tuple[SlotAllocator, Int32Array]
# Pages, the level that they come from, and the one that they go to.
_Way = tuple[Int32Array, LevelPools, LevelPools]


class Rejection(enum.Enum):
    """Why a submission was not accepted."""

    REFUSED = enum.auto()  # ask again; or a codec can not encode the pages, which they remember
    UNREADABLE = enum.auto()  # the codec can not decode the copies


def _events_of(touched: _Touched) -> Int64Array:
    """The ids of the events that the slots wait for. Those in a row mostly wait for the same one,
    which is named once: distinct ids of thousands cost as much as all else in a submission.
    """
    slots, ids = touched
    events = slots.event[ids]
    return np.append(events[:1], events[1:][events[1:] != events[:-1]])


class CodecMoves:
    """Moves batches of pages on two streams of its own."""

    def __init__(
        self,
        device: Device,
        calls: CodecCalls,
        levels: Sequence[LevelPools],
        table: PageTable,
        events: StorageEvents,
        class_names: Sequence[str],
    ) -> None:
        """``class_names`` is the page class of each life cycle."""
        self.ready = ReadyEvents()
        self._calls = calls
        self.hot_level = levels[HOT_LEVEL]
        self._table = table
        self._events = events
        self._failures = CodecFailures(levels, table, events, class_names)
        # After all that can fail: a stream ends with its device only.
        self.offload_stream = device.create_stream("offload")
        self.onboard_stream = device.create_stream("onboard")

    # ------------------------------------------------------------------ batching

    def batches(self, pages: Int32Array, *codecs: ConfiguredCodec) -> Iterator[Int32Array]:
        """The pages in batches that one call of each of the codecs may take.

        Equal representatives share pool groups on both sides, so they alone are the key.
        """
        life_cycles = self._table.life_cycle[pages]
        keys = codecs[0].representative[life_cycles].astype(np.int64)
        for codec in codecs[1:]:
            keys = (keys << 16) | codec.representative[life_cycles]
        for _, batch in split_by(keys, pages):
            yield batch

    def cold_batches(
        self, pages: Int32Array, source: LevelPools, target: LevelPools
    ) -> Iterator[Int32Array]:
        """The pages in batches that one move between two cold levels may take: raw copies by pool
        group, since no codec is asked; what is transcoded by what both codecs may take.
        """
        if source.codec is not target.codec:
            yield from self.batches(pages, source.codec, target.codec)
            return
        # One codec groups the pages of both levels alike.
        for _, batch in source.split(self._table.life_cycle[pages], pages):
            yield batch

    def representative(self, codec: ConfiguredCodec, batch: Int32Array) -> LifeCycleId:
        """The life cycle that stands for all pages of a batch."""
        return LifeCycleId(int(codec.representative[self._table.life_cycle[batch[0]]]))

    def cold_page_bytes(self, codec: ConfiguredCodec, batch: Int32Array) -> int:
        """The size, and stride, of the cold pages of a batch."""
        return codec.cold_page_bytes[self.representative(codec, batch)]

    # ------------------------------------------------------------------ the transaction

    def _submit(
        self,
        stream: Stream,
        sources: Sequence[_Touched],
        destinations: Sequence[_Touched],
        work: Callable[[], None],
        way: _Way | None = None,
    ) -> Event | Rejection:
        """Enqueue ``work`` after the ready events of everything it touches, and leave its own event
        there. Returns that, or why the work was rejected. ``way`` is for work of codecs.
        """
        for touched in (*sources, *destinations):
            self.ready.wait_on(stream, _events_of(touched))
        rejection: Rejection | None = None
        try:
            work()
        except CodecFailedError as error:
            assert way is not None, "a codec was asked"
            self._failures.note(error, *way)
            rejection = Rejection.UNREADABLE if error.call == "decode" else Rejection.REFUSED
        except SubmissionError:
            self._events.totals["rejected_submissions"] += 1
            rejection = Rejection.REFUSED
        # Also after a rejection: a codec may have enqueued a part before it failed.
        event = stream.record()
        event_id = self.ready.register(event)
        for slots, ids in (*sources, *destinations):
            slots.event[ids] = event_id
        return event if rejection is None else rejection

    def _touched(self, level: LevelPools, batch: Int32Array) -> _Touched:
        group = level.group_of(self._table.life_cycle[batch[0]])
        return group.slots, self._table.slot[level.level, batch]

    def _base(self, level: LevelPools, batch: Int32Array) -> MemAddress:
        return level.group_of(self._table.life_cycle[batch[0]]).cold_memory.base_address

    def _encode(
        self,
        codec: ConfiguredCodec,
        batch: Int32Array,
        base: MemAddress,
        dst: Int32Array,
        src: Int32Array,
    ) -> None:
        """Hot -> cold on the offload stream."""
        life_cycle, ordinals = self.representative(codec, batch), self._table.ordinal[batch]
        self._calls.encode(codec, life_cycle, base, dst, src, ordinals, self.offload_stream)

    def _decode(
        self,
        codec: ConfiguredCodec,
        batch: Int32Array,
        base: MemAddress,
        dst: Int32Array,
        src: Int32Array,
        stream: Stream,
    ) -> None:
        life_cycle, ordinals = self.representative(codec, batch), self._table.ordinal[batch]
        self._calls.decode(codec, life_cycle, base, dst, src, ordinals, stream)

    # ------------------------------------------------------------------ hot <-> cold memory

    def offload(self, pages: Int32Array, level: LevelPools) -> Int32Array:
        """Enqueue hot -> ``level`` (memory), into the slots that the pages have there already.

        Returns the pages whose submission was rejected: they are as before, without their slots
        there, and remember it where the codec failed.
        """
        refused = [
            batch
            for batch in self.batches(pages, level.codec)
            if not self._offload_batch(batch, level)
        ]
        return np.concatenate(refused) if refused else pages[:0]

    def _offload_batch(self, batch: Int32Array, level: LevelPools) -> bool:
        hot, cold = self._touched(self.hot_level, batch), self._touched(level, batch)
        base = self._base(level, batch)
        event = self._submit(
            self.offload_stream,
            [hot],
            [cold],
            lambda: self._encode(level.codec, batch, base, cold[1], hot[1]),
            (batch, self.hot_level, level),
        )
        if isinstance(event, Rejection):
            cold[0].free(cold[1])
            return False
        self._arrived(batch, self.hot_level, level)
        return True

    def onboard(self, pages: Int32Array, level: LevelPools) -> tuple[Int32Array, Int32Array]:
        """Enqueue ``level`` (memory) -> hot. Returns the pages whose submission was rejected, as
        ``offload`` does; and those whose copies the codec can not decode, which keep their hot
        slots, with nothing of theirs in them.
        """
        refused, unreadable = [pages[:0]], [pages[:0]]
        for batch in self.batches(pages, level.codec):
            rejection = self._onboard_batch(batch, level)
            if rejection is Rejection.REFUSED:
                refused.append(batch)
            elif rejection is Rejection.UNREADABLE:
                unreadable.append(batch)
        return np.concatenate(refused), np.concatenate(unreadable)

    def _onboard_batch(self, batch: Int32Array, level: LevelPools) -> Rejection | None:
        hot, cold = self._touched(self.hot_level, batch), self._touched(level, batch)
        base, stream = self._base(level, batch), self.onboard_stream
        event = self._submit(
            stream,
            [cold],
            [hot],
            lambda: self._decode(level.codec, batch, base, hot[1], cold[1], stream),
            (batch, level, self.hot_level),
        )
        if isinstance(event, Rejection):
            if event is Rejection.REFUSED:
                hot[0].free(hot[1])
            return event
        self._arrived(batch, level, self.hot_level)
        return None

    def _arrived(self, batch: Int32Array, source: LevelPools, target: LevelPools) -> None:
        self._table.present[batch] |= target.bit
        cold = source if target is self.hot_level else target
        page_bytes = self.cold_page_bytes(cold.codec, batch)
        self._events.moved(batch, source.level, target.level, page_bytes)

    # ------------------------------------------------------------------ hot <-> staging

    def encode_staged(
        self, batch: Int32Array, target: LevelPools, lease: StagingBuffer
    ) -> Event | None:
        """Enqueue hot -> staging in the form of ``target``, page ``i`` at the ``i``-th slice. The
        lease belongs to the offload stream.

        Returns the event of the encoded bytes, or None when the submission was rejected.
        """
        hot = self._touched(self.hot_level, batch)
        slices = np.arange(batch.size, dtype=np.int32)
        event = self._submit(
            self.offload_stream,
            [hot],
            [],
            lambda: self._encode(target.codec, batch, lease.address, slices, hot[1]),
            (batch, self.hot_level, target),
        )
        return None if isinstance(event, Rejection) else event

    def decode_staged(
        self, batch: Int32Array, source: LevelPools, slices: Int32Array, lease: StagingBuffer
    ) -> Rejection | None:
        """Enqueue staging in the form of ``source`` -> hot for the verified ``slices``; the lease
        passes to the onboard stream.

        The pages' hot slots are allocated. Returns why the submission was rejected, if it was.
        """
        stream = self.onboard_stream
        lease.set_stream(stream)
        hot = self._touched(self.hot_level, batch)
        event = self._submit(
            stream,
            [],
            [hot],
            lambda: self._decode(source.codec, batch, lease.address, hot[1], slices, stream),
            (batch, source, self.hot_level),
        )
        return event if isinstance(event, Rejection) else None

    # ------------------------------------------------------------------ cold -> cold

    def copy_cold(self, pages: Int32Array, source: LevelPools, target: LevelPools) -> Int32Array:
        """Enqueue one cold level in memory -> another, into the slots that the pages have there
        already: raw where both have the same codec. Returns the pages whose submission was
        rejected, without their slots there.
        """
        refused: list[Int32Array] = []
        for batch in self.cold_batches(pages, source, target):
            src, dst = self._touched(source, batch), self._touched(target, batch)
            work, way = self._cold_work(batch, source, target), (batch, source, target)
            if isinstance(self._submit(self.offload_stream, [src], [dst], work, way), Rejection):
                dst[0].free(dst[1])
                refused.append(batch)
                continue
            self._table.present[batch] |= target.bit
            page_bytes = self.cold_page_bytes(target.codec, batch)
            self._events.moved(batch, source.level, target.level, page_bytes)
        return np.concatenate(refused) if refused else pages[:0]

    def _cold_work(
        self, batch: Int32Array, source: LevelPools, target: LevelPools
    ) -> Callable[[], None]:
        src, dst = self._touched(source, batch)[1], self._touched(target, batch)[1]
        places = (self._base(source, batch), src), (self._base(target, batch), dst)
        return lambda: self._copy_or_transcode(batch, source.codec, target.codec, *places)

    def _copy_or_transcode(
        self,
        batch: Int32Array,
        source: ConfiguredCodec,
        target: ConfiguredCodec,
        src: tuple[MemAddress, Int32Array],
        dst: tuple[MemAddress, Int32Array],
    ) -> None:
        """Raw where both have the same codec. On the offload stream."""
        if source is not target:
            self._transcode(batch, source, target, src, dst)
            return
        page_bytes = self.cold_page_bytes(source, batch)
        from_addresses, to_addresses = (
            base + slots.astype(np.int64) * page_bytes for base, slots in (src, dst)
        )
        sizes = np.full(batch.size, page_bytes, np.int64)
        self.offload_stream.copy(to_addresses, from_addresses, sizes)

    def _transcode(
        self,
        batch: Int32Array,
        source: ConfiguredCodec,
        target: ConfiguredCodec,
        src: tuple[MemAddress, Int32Array],
        dst: tuple[MemAddress, Int32Array],
    ) -> None:
        """Decode and encode through the scratch slots. Both on the offload stream, on which alone
        scratch slots are used, so their next use comes after this one.
        """
        group = self.hot_level.group_of(self._table.life_cycle[batch[0]])
        assert group.slots.first_slot >= NUM_SCRATCH_SLOTS, "no scratch slots were set aside"
        for start in range(0, batch.size, NUM_SCRATCH_SLOTS):
            chunk = slice(start, start + NUM_SCRATCH_SLOTS)
            some = batch[chunk]
            scratch = np.arange(some.size, dtype=np.int32)
            self._decode(source, some, src[0], scratch, src[1][chunk], self.offload_stream)
            self._encode(target, some, dst[0], dst[1][chunk], scratch)
        self._events.totals["transcoded_pages"] += int(batch.size)

    def cold_to_staging(
        self, batch: Int32Array, source: LevelPools, target: LevelPools, lease: StagingBuffer
    ) -> Event | None:
        """Enqueue ``source`` (memory) -> staging in ``target``'s form. As ``encode_staged``."""
        src = self._touched(source, batch)
        slices = np.arange(batch.size, dtype=np.int32)
        places = (self._base(source, batch), src[1]), (lease.address, slices)
        event = self._submit(
            self.offload_stream,
            [src],
            [],
            lambda: self._copy_or_transcode(batch, source.codec, target.codec, *places),
            (batch, source, target),
        )
        return None if isinstance(event, Rejection) else event

    def staging_to_cold(
        self,
        batch: Int32Array,
        source: LevelPools,
        slices: Int32Array,
        lease: StagingBuffer,
        target: LevelPools,
    ) -> Rejection | None:
        """Enqueue staging in the form of ``source`` -> ``target`` (memory). As ``decode_staged``,
        on the offload stream.
        """
        lease.set_stream(self.offload_stream)
        dst = self._touched(target, batch)
        places = (lease.address, slices), (self._base(target, batch), dst[1])
        event = self._submit(
            self.offload_stream,
            [],
            [dst],
            lambda: self._copy_or_transcode(batch, source.codec, target.codec, *places),
            (batch, source, target),
        )
        return event if isinstance(event, Rejection) else None

    # ------------------------------------------------------------------ within a level

    def copy_hot(self, src: Int32Array, dst: Int32Array) -> None:
        """Enqueue hot -> hot, ``dst[i] <- src[i]``, both in hot slots. Raises SubmissionError."""
        slot = self._table.slot[HOT_LEVEL]
        order = np.arange(src.size)
        for group, members in self.hot_level.split(self._table.life_cycle[src], order):
            if not self.copy_within(group, slot[src[members]], slot[dst[members]]):
                raise SubmissionError("a copy within the hot level was rejected")
        self._events.totals["copied_on_write_pages"] += int(src.size)

    def copy_within(self, group: PoolGroup, src: Int32Array, dst: Int32Array) -> bool:
        """Enqueue slot ``src[i]`` -> ``dst[i]`` in every pool of a group in memory. Returns False
        when the submission was rejected.
        """
        stream, pools = self.onboard_stream, group.memory
        event = self._submit(
            stream,
            [(group.slots, src)],
            [(group.slots, dst)],
            lambda: copy_slots(pools, dst, pools, src, stream),
        )
        return not isinstance(event, Rejection)

    # ------------------------------------------------------------------ events of hot slots

    def order_after(self, pages: Int32Array, stream: Stream) -> None:
        """Make the pages' hot slots ready only after all work enqueued on ``stream`` so far (and
        before).
        """
        touched = list(self._hot_slots(pages))
        for slots_and_ids in touched:
            # Another reader's event must not be forgotten: make the new event come after it.
            self.ready.wait_on(stream, _events_of(slots_and_ids))
        event_id = self.ready.register(stream.record())
        for slots, ids in touched:
            slots.event[ids] = event_id

    def _hot_slots(self, pages: Int32Array) -> Iterator[_Touched]:
        for group, members in self.hot_level.split(self._table.life_cycle[pages], pages):
            yield group.slots, self._table.slot[HOT_LEVEL, members]

    def forget_events(self, pages: Int32Array) -> None:
        """The pages' hot slots wait for nothing: what was to make them ready has failed."""
        for slots, ids in self._hot_slots(pages):
            slots.event[ids] = 0

    def outstanding(self, pages: Int32Array) -> list[Event]:
        """The distinct events that the pages' hot slots still wait for."""
        return [
            event
            for touched in self._hot_slots(pages)
            for event in self.ready.outstanding(_events_of(touched))
        ]

    def synchronize(self) -> None:
        """Block until everything enqueued here has completed."""
        self.offload_stream.synchronize()
        self.onboard_stream.synchronize()
