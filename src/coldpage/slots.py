"""Slots of one pool group of one level: who owns each, which are free, and when each is ready."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Completion, Event, Stream
from coldpage.types import NO_PAGE, Int32Array, Int64Array

__all__ = ["SWEEP_INTERVAL_EVENTS", "ReadyEvents", "SlotAllocator"]

_Item = TypeVar("_Item", bound=np.generic)

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
    """Free list and owners of ``num_slots`` slots, ``first_slot <= slot < first_slot + num_slots``.
    A freed slot keeps its ready event for its next owner. Only the first ``num_ready`` have memory
    that can be used; the others are nobody's, and not free.

    ``page[slot]`` is the owner, NO_PAGE when free or quarantined. ``event[slot]`` is an id of
    ReadyEvents. Slots before ``first_slot`` are somebody else's.
    """

    def __init__(self, num_slots: int, first_slot: int = 0) -> None:
        self.first_slot = first_slot
        self.num_slots = num_slots
        self.num_ready = num_slots
        self.page: Int32Array = np.zeros(first_slot + num_slots, np.int32)
        self.event: Int64Array = np.zeros(first_slot + num_slots, np.int64)
        self.num_changes = 0  # grows with each allocation, free and quarantine
        self.num_dropped = 0  # pages lost for good while their only copy was here
        self._quarantined: set[int] = set()
        # A stack whose top is the lowest slot: a fresh pool is handed out in order, so neighbours
        # move together.
        self._free: Int32Array = np.arange(self.stop_slot - 1, first_slot - 1, -1, dtype=np.int32)
        self._num_free = num_slots
        self._peak_used = 0

    @property
    def stop_slot(self) -> int:
        """One more than the last slot."""
        return self.first_slot + self.num_slots

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return self._num_free

    @property
    def num_quarantined(self) -> int:
        """Slots that are out of use."""
        return len(self._quarantined)

    @property
    def num_used(self) -> int:
        """Slots that a page owns."""
        return self.num_ready - self._num_free - self.num_quarantined

    @property
    def peak_used(self) -> int:
        """The most slots owned at once since ``reset_peak``."""
        return max(self._peak_used, self.num_used)

    def reset_peak(self) -> None:
        """Forget the peak: it is what is used now."""
        self._peak_used = self.num_used

    def allocate(self, pages: Int32Array) -> Int32Array:
        """One slot for each of ``pages``. The caller has made sure that enough are free."""
        count = pages.size
        assert count <= self._num_free, f"{count} slots wanted, {self._num_free} free"
        slots = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.num_changes += 1
        self._peak_used = max(self._peak_used, self.num_used)
        self.page[slots] = pages
        return slots

    def adopt(self, slots: Int32Array, pages: Int32Array) -> None:
        """Make ``pages`` the owners of exactly these free slots: what they hold was found again."""
        assert not self.page[slots].any(), "a slot that has an owner was adopted"
        self.page[slots] = pages
        kept = self._free[: self._num_free]
        kept = kept[self.page[kept] == NO_PAGE]
        self._free[: kept.size] = kept
        self._num_free = int(kept.size)
        self.num_changes += 1
        self._peak_used = max(self._peak_used, self.num_used)

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
        self._quarantined.update(slots.tolist())
        self.num_changes += 1

    def release_quarantined(self, slots: Int32Array) -> None:
        """Slots that were out of use for a time are free again, to be handed out last."""
        slots = slots[slots < self.stop_slot]
        self._quarantined.difference_update(slots.tolist())
        self._free[slots.size : slots.size + self._num_free] = self._free[: self._num_free].copy()
        self._free[: slots.size] = slots
        self._num_free += int(slots.size)
        self.num_changes += 1

    def owned(self) -> npt.NDArray[np.intp]:
        """The slots that a page owns, ascending."""
        return np.flatnonzero(self.page)

    def num_free_below(self, slot: int) -> int:
        """Free slots with a lower id than ``slot``."""
        return int(np.count_nonzero(self._free[: self._num_free] < slot))

    def allocate_below(self, pages: Int32Array, limit: int) -> Int32Array:
        """As ``allocate``, slots with ids below ``limit`` only."""
        stack = self._free[: self._num_free]
        is_low = stack < limit
        stack[:] = np.concatenate([stack[~is_low], stack[is_low]])
        slots = self.allocate(pages)
        assert bool((slots < limit).all()), "too few slots are free below the limit"
        return slots

    def resize(self, num_slots: int, num_ready: int | None = None) -> None:
        """Have ``num_slots`` slots, the first ``num_ready`` of them (None: all) ready. Those cut
        off are free or quarantined; new ones wait for nothing.
        """
        stop = self.first_slot + num_slots
        assert not self.page[stop:].any(), "a slot that is cut off has an owner"
        self._set_ready(num_slots if num_ready is None else num_ready)
        free = self._free[: self._num_free]
        self.num_slots = num_slots
        self.page = _sized(self.page, stop)
        self.event = _sized(self.event, stop)
        self._free = np.zeros(num_slots, np.int32)
        self._free[: free.size] = free
        self.reset_peak()

    def set_ready(self, num_ready: int) -> None:
        """The first ``num_ready`` slots are ready now; those that are no longer have no owner."""
        assert 0 <= num_ready <= self.num_slots, "more slots are ready than there are"
        if num_ready != self.num_ready:
            self._set_ready(num_ready)

    def _set_ready(self, num_ready: int) -> None:
        old, stop = self.first_slot + self.num_ready, self.first_slot + num_ready
        assert not self.page[stop:].any(), "a slot that is not ready any more has an owner"
        kept = self._free[: self._num_free]
        fresh = np.arange(stop - 1, old - 1, -1, dtype=np.int32)
        # New slots at the bottom: what has been used before is warm.
        free = np.concatenate([fresh, kept[kept < stop]])
        self._quarantined = {slot for slot in self._quarantined if slot < stop}
        self._free = _sized(self._free, max(free.size, self.num_slots))
        self._free[: free.size] = free
        self._num_free = int(free.size)
        self.num_ready = num_ready
        self.num_changes += 1

    def check_integrity(self) -> None:
        """Assert that free, used and quarantined slots add up and that no free slot has
        an owner.
        """
        free = self._free[: self._num_free]
        assert np.unique(free).size == free.size, "a slot is on the free list twice"
        assert not self._quarantined.intersection(free.tolist()), "a quarantined slot is free"
        assert bool((free >= self.first_slot).all()), "a reserved slot is free"
        num_places = self.first_slot + self.num_ready
        assert bool((free < num_places).all()), "a slot that is not ready is free"
        assert not self.page[num_places:].any(), "a slot that is not ready has an owner"
        assert not self.page[free].any(), "a free slot has an owner"
        assert int(np.count_nonzero(self.page)) == self.num_used, (
            "free + used + quarantined != total"
        )


def _sized(array: npt.NDArray[_Item], size: int) -> npt.NDArray[_Item]:
    """The array cut off, or with zeros at its end."""
    sized = np.zeros(size, array.dtype)
    kept = min(size, array.size)
    sized[:kept] = array[:kept]
    return sized
