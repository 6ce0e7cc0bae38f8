"""Slots of one pool group of one level: who owns each, which are free, and when each is ready."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Completion, Event, Stream
from coldpage.types import NO_PAGE, Int32Array, Int64Array

__all__ = ["SWEEP_INTERVAL_EVENTS", "ReadyEvents", "SlotAllocator"]

# Finished events are swept out whenever this many have been registered since the last sweep.
SWEEP_INTERVAL_EVENTS: Final = 256


class ReadyEvents:
    """The events that slots still wait for, by id. Id 0 means ready; ids are never reused."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}
        self._next_id = 1
        self._next_sweep = SWEEP_INTERVAL_EVENTS

    def register(self, event: Event) -> int:
        """An id for ``event``, to be kept by the slots that it makes ready."""
        event_id = self._next_id
        self._next_id += 1
        self._events[event_id] = event
        if event_id >= self._next_sweep:
            self._next_sweep = event_id + SWEEP_INTERVAL_EVENTS
            self._events = {i: e for i, e in self._events.items() if not e.is_done()}
        return event_id

    def outstanding(self, event_ids: Int64Array) -> list[Event]:
        """The distinct events among ``event_ids`` that are not known to be done."""
        if not self._events or not event_ids.size:
            return []
        found = [self._events[i] for i in np.unique(event_ids).tolist() if i in self._events]
        return [event for event in found if not event.is_done()]

    def wait_on(self, stream: Stream, event_ids: Int64Array) -> None:
        """Make ``stream`` wait for every event among ``event_ids`` that is not done."""
        for event in self.outstanding(event_ids):
            stream.wait(event)

    def all_outstanding(self) -> list[Completion]:
        """Every event not known to be done, for teardown."""
        return [event for event in self._events.values() if not event.is_done()]


class SlotAllocator:
    """Free list and owners of ``num_slots`` slots. A freed slot keeps its ready event for its next
    owner.

    ``page[slot]`` is the owner, NO_PAGE when free or quarantined. ``event[slot]`` is an id of
    ReadyEvents.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.page: Int32Array = np.zeros(num_slots, np.int32)
        self.event: Int64Array = np.zeros(num_slots, np.int64)
        self.num_quarantined = 0
        self.num_changes = 0  # grows with each allocation, free and quarantine
        # A stack whose top is the lowest slot: a fresh pool is handed out in order, so neighbours
        # move together.
        self._free: Int32Array = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots that a page owns."""
        return self.num_slots - self._num_free - self.num_quarantined

    def allocate(self, pages: Int32Array) -> Int32Array:
        """One slot for each of ``pages``. The caller has made sure that enough are free."""
        count = pages.size
        assert count <= self._num_free, f"{count} slots wanted, {self._num_free} free"
        slots = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.num_changes += 1
        self.page[slots] = pages
        return slots

    def free(self, slots: Int32Array) -> None:
        """Give slots back; their ready events stay with them."""
        assert bool(np.all(self.page[slots] != NO_PAGE)), "a free slot was freed again"
        self.page[slots] = NO_PAGE
        self._free[self._num_free : self._num_free + slots.size] = slots[::-1]
        self._num_free += slots.size
        self.num_changes += 1

    def free_last(self, slots: Int32Array) -> None:
        """As ``free``, but these are handed out again only after every other free slot."""
        self.free(slots)
        stack = self._free[: self._num_free]
        stack[:] = np.roll(stack, slots.size)

    def quarantine(self, slots: Int32Array) -> None:
        """Take owned slots out of use for good: their medium can not be trusted."""
        assert bool(np.all(self.page[slots] != NO_PAGE)), "a free slot was quarantined"
        self.page[slots] = NO_PAGE
        self.num_quarantined += int(slots.size)
        self.num_changes += 1

    def owned(self) -> npt.NDArray[np.intp]:
        """The slots that a page owns, ascending."""
        return np.flatnonzero(self.page)

    def check_integrity(self) -> None:
        """Assert that free, used and quarantined slots add up and that no free slot has
        an owner.
        """
        free = self._free[: self._num_free]
        assert np.unique(free).size == free.size, "a slot is on the free list twice"
        assert not self.page[free].any(), "a free slot has an owner"
        assert int(np.count_nonzero(self.page)) == self.num_used, (
            "free + used + quarantined != total"
        )
