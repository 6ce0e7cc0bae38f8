"""A ring of staging memory: byte-accurate next-fit leases, ordered by events instead of by waiting.

The ring is a spatially ordered partition of one allocation. A *live range* is a lease; a *retired
range* keeps the event of its last owner, so whoever gets those bytes next waits for exactly that.
Nothing here is thread-safe: a ring belongs to one manager, which one thread mutates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coldpage.device.base import Device, Event, Memory, MemoryKind, Stream
from coldpage.errors import UsageError
from coldpage.types import MemAddress

__all__ = ["MIN_PAGE_RING_BYTES", "StagingBuffer", "StagingRing", "page_ring_bytes"]

MIN_PAGE_RING_BYTES: Final = 64 * 1024 * 1024
_PAGES_IN_FLIGHT: Final = 3


def page_ring_bytes(max_cold_page_bytes: int) -> int:
    """The size of the page ring: max(64 MiB, three of the largest cold pages)."""
    return max(MIN_PAGE_RING_BYTES, _PAGES_IN_FLIGHT * max_cold_page_bytes)


@dataclass(slots=True)
class _Range:
    """``start <= offset < stop``; live while ``is_live``, else retired with its last
    owner's event.
    """

    start: int
    stop: int
    is_live: bool = False
    event: Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class StagingBuffer:
    """A lease of a part of the ring, owned by a stream or, when ``stream`` is None, by the CPU.

    Use it with ``with``, or call ``release``. Whoever takes it over for asynchronous work calls
    ``set_stream`` first; CPU access must be over by then.
    """

    def __init__(self, ring: StagingRing, live: _Range, stream: Stream | None) -> None:
        self._ring: StagingRing | None = ring
        self._live = live
        self._stream = stream
        self.address = MemAddress(ring.base_address + live.start)
        self.num_bytes = live.num_bytes

    @property
    def stream(self) -> Stream | None:
        """The stream that owns the bytes now; None: the CPU does."""
        return self._stream

    def set_stream(self, stream: Stream | None) -> None:
        """Transfer ownership. From stream to stream an event orders the two; to the CPU
        it blocks.
        """
        old = self._stream
        if old is not None and old is not stream:
            if stream is None:
                old.synchronize()
            else:
                stream.wait(old.record())
        self._stream = stream

    def release(self, *, is_idle: bool = False) -> None:
        """End the lease. Owned by a stream, the bytes are ready again when its work so far is done;
        at once with ``is_idle``, by which the caller says that all work on them has ended.
        """
        if self._ring is None:
            raise UsageError("a staging buffer was released twice")
        is_ready = is_idle or self._stream is None
        event = None if is_ready or self._stream is None else self._stream.record()
        self._ring._retire(self._live, event)
        self._ring = None

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._ring is not None:
            self.release()


class StagingRing:
    """Leases out ``num_bytes`` of memory that it owns."""

    def __init__(self, device: Device, num_bytes: int, kind: MemoryKind) -> None:
        self._memory: Memory = device.allocate(num_bytes, kind)
        self.base_address = self._memory.address
        self.num_bytes = num_bytes
        self._ranges: list[_Range] = [_Range(0, num_bytes)]
        self._cursor = 0

    @property
    def num_ready_bytes(self) -> int:
        """How much of it can be leased: the device may still prepare the rest."""
        return self._memory.num_ready_bytes

    @property
    def num_live(self) -> int:
        """Leases that are out."""
        return sum(r.is_live for r in self._ranges)

    @property
    def live_bytes(self) -> int:
        """Bytes that are leased out."""
        return sum(r.num_bytes for r in self._ranges if r.is_live)

    def acquire(
        self,
        min_bytes: int,
        max_bytes: int,
        granularity: int,
        alignment: int,
        stream: Stream | None,
        *,
        may_wait: bool = True,
    ) -> StagingBuffer | None:
        """Lease between ``min_bytes`` (rounded up to ``granularity``) and ``max_bytes`` (rounded
        down).

        With a stream, that stream waits for the previous owners; with None this call blocks for
        them, or without ``may_wait`` returns None while they are at work. Returns None when no run
        is long enough, without waiting for a live lease. Raises ValueError for bounds that make no
        sense.
        """
        least, most = self._check(min_bytes, max_bytes, granularity, alignment)
        found = self._find(least, alignment)
        if found is None:
            return None
        start, stop = found
        size = min(most, (stop - start) // granularity * granularity)
        # Before anything changes: a stream or an event that has failed raises here.
        events = self._events_of(start, start + size)
        if stream is None and not may_wait:
            if not all(event.is_done() for event in events):
                return None
        else:
            for event in events:
                if stream is not None:
                    stream.wait(event)
                else:
                    event.synchronize()
        self._cursor = start + size if start + size < self.num_bytes else 0
        return StagingBuffer(self, self._carve(start, start + size), stream)

    @staticmethod
    def _check(min_bytes: int, max_bytes: int, granularity: int, alignment: int) -> tuple[int, int]:
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        if granularity <= 0 or granularity % alignment:
            raise ValueError(f"granularity {granularity} is not a positive multiple of {alignment}")
        least = -(-min_bytes // granularity) * granularity
        most = max_bytes // granularity * granularity
        if min_bytes <= 0 or most < least:
            raise ValueError(f"no multiple of {granularity} lies in [{min_bytes}, {max_bytes}]")
        return least, most

    def _find(self, least: int, alignment: int) -> tuple[int, int] | None:
        """The aligned start and the end of the first retired run that holds ``least`` bytes: from
        the cursor to the physical end, then once more from the beginning. Memory that the device
        has yet to prepare is none.
        """
        stop = self.num_ready_bytes
        ranges = [r for r in self._ranges if r.start < stop]
        end = _Range(stop, stop, is_live=True)
        for lower in (self._cursor, 0):
            run_start: int | None = None
            for r in [*ranges, end]:
                if not r.is_live:
                    if run_start is None and r.stop > lower:
                        run_start = max(r.start, lower)
                    continue
                if run_start is not None:
                    address = self.base_address + run_start
                    start = run_start + (-address) % alignment
                    if r.start - start >= least:
                        return start, r.start
                run_start = None
        return None

    def _events_of(self, start: int, stop: int) -> list[Event]:
        """The distinct events of the last owners of [start, stop)."""
        events: list[Event] = []
        for r in self._ranges:
            overlaps = r.start < stop and start < r.stop
            if overlaps and r.event is not None and not any(r.event is e for e in events):
                events.append(r.event)
        return events

    def _carve(self, start: int, stop: int) -> _Range:
        """Make [start, stop) one live range; what is cut off its retired neighbours keeps their
        events.
        """
        kept: list[_Range] = []
        live = _Range(start, stop, is_live=True)
        for r in self._ranges:
            if r.stop <= start or r.start >= stop:
                kept.append(r)
                continue
            assert not r.is_live, "a live range was leased again"
            if r.start < start:
                kept.append(_Range(r.start, start, event=r.event))
            if r.start <= start:
                kept.append(live)
            if r.stop > stop:
                kept.append(_Range(stop, r.stop, event=r.event))
        self._ranges = kept
        return live

    def _retire(self, live: _Range, event: Event | None) -> None:
        live.is_live = False
        live.event = event
        merged: list[_Range] = []
        for r in self._ranges:
            last = merged[-1] if merged else None
            if last and not last.is_live and not r.is_live and last.event is r.event:
                last.stop = r.stop
            else:
                merged.append(r)
        self._ranges = merged

    def retired_events(self) -> Sequence[Event]:
        """The events that retired ranges still carry."""
        return [r.event for r in self._ranges if r.event is not None]

    def check_integrity(self) -> None:
        """Assert that the ranges partition the ring."""
        edges = [0, *(r.stop for r in self._ranges)]
        starts = [r.start for r in self._ranges]
        assert starts == edges[:-1] and edges[-1] == self.num_bytes, (
            "the ranges do not cover the ring"
        )
        assert all(r.num_bytes > 0 for r in self._ranges), "an empty range"

    def close(self) -> None:
        """Wait for the last owners and free the memory. No lease may be out."""
        assert self.num_live == 0, "a staging lease outlives its ring"
        for event in self.retired_events():
            event.synchronize()
        self._memory.free()
