"""The slot allocator against sets, and the events that slots wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coldpage.device.host import HostDevice
from coldpage.slots import SWEEP_INTERVAL_EVENTS, ReadyEvents, SlotAllocator
from coldpage.types import NO_PAGE

_MAX_SLOTS = 12


class _Machine(RuleBasedStateMachine):
    """Who owns which slot, as a dictionary; what is out of use, as a set; and what is free, as a
    list in the order in which it is handed out.
    """

    @initialize(first=st.sampled_from([0, 0, 1, 4]), num_slots=st.integers(0, _MAX_SLOTS))
    def build(self, first: int, num_slots: int) -> None:
        self.slots = SlotAllocator(num_slots, first)
        self.first, self.stop = first, first + num_slots
        self.owner: dict[int, int] = {}
        self.free = list(range(first, self.stop))
        self.quarantined: set[int] = set()
        self.events = dict.fromkeys(self.free, 0)
        self.peak = self.num_changes = 0
        self.next_page = 1

    def _new_pages(self, count: int) -> np.ndarray:
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        return pages

    def _take(self, slots: list[int], pages: np.ndarray) -> None:
        self.owner |= dict(zip(slots, pages.tolist(), strict=True))
        self.peak = max(self.peak, len(self.owner))

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        pages = self._new_pages(count)
        got = self.slots.allocate(pages)
        assert got.dtype == np.int32
        assert got.tolist() == self.free[:count]
        del self.free[:count]
        self._take(got.tolist(), pages)
        self._expect_change()

    @rule(data=st.data(), limit=st.integers(0, 2 * _MAX_SLOTS))
    def allocate_below(self, data: st.DataObject, limit: int) -> None:
        low = [slot for slot in self.free if slot < limit]
        assert self.slots.num_free_below(limit) == len(low)
        count = data.draw(st.integers(0, len(low)))
        pages = self._new_pages(count)
        assert self.slots.allocate_below(pages, limit).tolist() == low[:count]
        self.free = low[count:] + [slot for slot in self.free if slot >= limit]
        self._take(low[:count], pages)
        self._expect_change()

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), is_last=st.booleans())
    def release(self, data: st.DataObject, is_last: bool) -> None:
        some = self._draw_owned(data)
        if is_last:
            self.slots.free_last(np.array(some, np.int32))
            self.free += some
        else:
            self.slots.free(np.array(some, np.int32))
            self.free = some + self.free
        for slot in some:
            del self.owner[slot]
        self._expect_change()

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        some = self._draw_owned(data)[:2]
        self.slots.quarantine(np.array(some, np.int32))
        self.quarantined |= set(some)
        for slot in some:
            del self.owner[slot]
        self._expect_change()

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        """Down to the last slot in use, and up again."""
        least = max(self.owner, default=self.first - 1) + 1
        stop = data.draw(st.integers(least, max(least, self.first + _MAX_SLOTS)))
        self.slots.resize(stop - self.first)
        fresh = list(range(self.stop, stop))
        # What has been free for longer is warm: it goes first.
        self.free = [slot for slot in self.free if slot < stop] + fresh
        self.quarantined = {slot for slot in self.quarantined if slot < stop}
        self.events = {s: e for s, e in self.events.items() if s < stop} | dict.fromkeys(fresh, 0)
        self.stop = stop
        self.peak = len(self.owner)
        self._expect_change()

    @rule()
    def reset_peak(self) -> None:
        self.slots.reset_peak()
        self.peak = len(self.owner)

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), event_id=st.integers(1, 1000))
    def attach_an_event(self, data: st.DataObject, event_id: int) -> None:
        for slot in self._draw_owned(data):
            self.slots.event[slot] = self.events[slot] = event_id

    def _draw_owned(self, data: st.DataObject) -> list[int]:
        owned = st.sampled_from(sorted(self.owner))
        return data.draw(st.lists(owned, unique=True, min_size=1))

    def _expect_change(self) -> None:
        assert self.slots.num_changes > self.num_changes
        self.num_changes = self.slots.num_changes

    @invariant()
    def they_agree(self) -> None:
        self.slots.check_integrity()
        assert self.slots.num_changes == self.num_changes
        assert (self.slots.first_slot, self.slots.stop_slot) == (self.first, self.stop)
        assert self.slots.num_slots == self.stop - self.first
        assert self.slots.num_free == len(self.free)
        assert self.slots.num_used == len(self.owner)
        assert self.slots.num_quarantined == len(self.quarantined)
        assert self.slots.peak_used == self.peak
        assert self.slots.owned().tolist() == sorted(self.owner)
        assert {s: int(self.slots.page[s]) for s in self.owner} == self.owner
        # Through freeing, quarantine, the next owner, and another size; those cut off begin anew.
        assert self.slots.event.tolist() == [0] * self.first + list(self.events.values())


_Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
test_slots_are_a_list_and_two_sets = _Machine.TestCase


def _pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_fresh_pool_is_handed_out_in_order() -> None:
    slots = SlotAllocator(6)
    assert slots.allocate(_pages(1, 2)).tolist() == [0, 1]
    assert slots.allocate(_pages(3, 4, 5)).tolist() == [2, 3, 4]


def test_what_was_freed_together_is_handed_out_together_in_order() -> None:
    slots = SlotAllocator(6)
    slots.allocate(_pages(1, 2, 3, 4))
    slots.free(_pages(1, 2, 3))
    assert slots.allocate(_pages(5, 6, 7)).tolist() == [1, 2, 3]


def test_more_than_is_free_is_a_bug_that_changes_nothing() -> None:
    slots = SlotAllocator(2)
    with pytest.raises(AssertionError, match="3 slots wanted, 2 free"):
        slots.allocate(_pages(1, 2, 3))
    assert slots.num_free == 2
    slots.check_integrity()


@pytest.mark.parametrize("twice", ["free", "quarantine"])
def test_a_free_slot_can_not_be_given_back(twice: str) -> None:
    slots = SlotAllocator(3)
    got = slots.allocate(_pages(1, 2))
    slots.free(got[:1])
    with pytest.raises(AssertionError, match="a free slot was"):
        getattr(slots, twice)(got)
    assert slots.num_free == 2
    slots.check_integrity()


def test_reserved_slots_are_never_handed_out() -> None:
    slots = SlotAllocator(3, first_slot=4)
    assert slots.allocate(_pages(1, 2, 3)).tolist() == [4, 5, 6]
    slots.resize(5)
    assert slots.allocate(_pages(4, 5)).tolist() == [7, 8]
    assert slots.num_free_below(4) == 0
    assert slots.page.tolist() == [NO_PAGE] * 4 + [1, 2, 3, 4, 5]


def test_too_few_below_a_limit_is_a_bug() -> None:
    slots = SlotAllocator(4)
    with pytest.raises(AssertionError, match="too few slots are free below the limit"):
        slots.allocate_below(_pages(1, 2, 3), 2)


def test_a_slot_in_use_can_not_be_cut_off() -> None:
    slots = SlotAllocator(4, first_slot=1)
    slots.allocate(_pages(1, 2, 3))
    with pytest.raises(AssertionError, match="a slot that is cut off has an owner"):
        slots.resize(2)
    slots.check_integrity()
    assert slots.num_slots == 4
    slots.resize(3)
    assert (slots.num_used, slots.num_free) == (3, 0)


def test_a_slot_that_was_cut_off_comes_back_good_and_ready() -> None:
    slots = SlotAllocator(3)
    got = slots.allocate(_pages(1, 2, 3))
    slots.event[got] = 7
    slots.quarantine(got[1:])
    slots.resize(2)
    assert slots.num_quarantined == 1
    slots.resize(4)
    assert slots.num_quarantined == 1
    assert slots.event.tolist() == [7, 7, 0, 0]
    assert slots.allocate(_pages(4, 5)).tolist() == [2, 3]


def test_only_ready_slots_are_handed_out() -> None:
    slots = SlotAllocator(6, first_slot=1)
    slots.set_ready(2)
    assert (slots.num_slots, slots.num_ready, slots.num_free, slots.num_used) == (6, 2, 2, 0)
    with pytest.raises(AssertionError, match="3 slots wanted, 2 free"):
        slots.allocate(_pages(1, 2, 3))
    assert slots.allocate(_pages(1, 2)).tolist() == [1, 2]
    changes, peak = slots.num_changes, slots.peak_used
    slots.set_ready(2)
    assert slots.num_changes == changes, "nothing has changed"
    slots.set_ready(5)
    assert (slots.num_free, slots.num_used, slots.peak_used) == (3, 2, peak)
    slots.free(np.array([1], np.int32))
    assert slots.allocate(_pages(3, 4)).tolist() == [1, 3], "what has been used before is warm"
    slots.check_integrity()
    slots.resize(9, 6)
    assert (slots.num_slots, slots.num_ready, slots.num_free, slots.num_used) == (9, 6, 3, 3)
    slots.resize(4, 4)
    assert (slots.num_slots, slots.num_ready, slots.num_free) == (4, 4, 1)
    slots.check_integrity()


def test_a_slot_in_use_stays_ready() -> None:
    slots = SlotAllocator(4)
    slots.allocate(_pages(1, 2))
    with pytest.raises(AssertionError, match="not ready any more has an owner"):
        slots.set_ready(1)
    with pytest.raises(AssertionError, match="more slots are ready than there are"):
        slots.set_ready(5)


def test_a_resize_starts_a_new_peak_and_keeps_what_was_dropped() -> None:
    slots = SlotAllocator(4)
    assert slots.num_dropped == 0
    slots.num_dropped = 9
    slots.free(slots.allocate(_pages(1, 2, 3)))
    assert slots.peak_used == 3
    slots.resize(2)
    assert slots.peak_used == 0
    assert slots.num_dropped == 9


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("twice on the list", "a slot is on the free list twice"),
        ("owner of a free slot", "a free slot has an owner"),
        ("lost owner", r"free \+ used \+ quarantined != total"),
        ("owner of a reserved slot", r"free \+ used \+ quarantined != total"),
        ("free and out of use", "a quarantined slot is free"),
        ("free and reserved", "a reserved slot is free"),
        ("free and not ready", "a slot that is not ready is free"),
        ("owner of one that is not ready", "a slot that is not ready has an owner"),
    ],
)
def test_damage_is_noticed(damage: str, sentence: str) -> None:
    slots = SlotAllocator(4, first_slot=2)
    got = slots.allocate(_pages(1, 2))
    if "not ready" in damage:
        slots.set_ready(3)
        slots.page[5] = 9
    if damage == "free and not ready":
        slots.free(np.array([5], np.int32))
    elif damage == "owner of one that is not ready":
        pass
    elif damage == "twice on the list":
        slots.free(np.concatenate([got[:1], got[:1]]))
    elif damage == "owner of a free slot":
        slots.page[5] = 9
    elif damage == "lost owner":
        slots.page[got[0]] = NO_PAGE
    elif damage == "owner of a reserved slot":
        slots.page[1] = 9
    elif damage == "free and out of use":
        slots.quarantine(got[:1])
        slots.page[got[0]] = 1
        slots.free(got[:1])
    else:
        slots.page[0] = 9
        slots.free(_pages(0))
    with pytest.raises(AssertionError, match=sentence):
        slots.check_integrity()


# ---------------------------------------------------------------------- events


def _ids(*event_ids: int) -> np.ndarray:
    return np.array(event_ids, np.int64)


class _Gated:
    """A host device with one stream whose work does not end before ``open``."""

    def __init__(self) -> None:
        self.device = HostDevice()
        self.held = self.device.create_stream("held")
        self.done = self.device.create_stream("done")
        self.seen: list[str] = []
        self._gate = threading.Event()
        self.held.launch(self._pass_gate, reads=(), writes=())

    def _pass_gate(self) -> None:
        assert self._gate.wait(20.0)
        self.seen.append("first")

    def open(self) -> None:
        self._gate.set()
        self.held.synchronize()


@pytest.fixture
def gated() -> Iterator[_Gated]:
    gated = _Gated()
    yield gated
    gated.open()
    gated.device.close()


def test_outstanding_are_the_distinct_events_that_are_not_done(gated: _Gated) -> None:
    ready = ReadyEvents()
    events = [gated.held.record(), gated.done.record(), gated.held.record()]
    ids = [ready.register(event) for event in events]
    assert len({0, *ids}) == 4, "0 means ready"
    assert ready.outstanding(_ids(0, *ids, *ids, 0)) == [events[0], events[2]]
    assert ready.all_outstanding() == [events[0], events[2]]
    gated.open()
    assert ready.outstanding(_ids(*ids)) == []
    assert ready.all_outstanding() == []


def test_what_is_ready_or_swept_out_is_not_waited_for() -> None:
    ready = ReadyEvents()
    for ids in (_ids(), _ids(0, 0), _ids(77)):
        assert ready.outstanding(ids) == []


def test_a_stream_waits_for_what_is_not_done(gated: _Gated) -> None:
    ready = ReadyEvents()
    ids = _ids(0, ready.register(gated.held.record()), ready.register(gated.done.record()))
    waiting = gated.device.create_stream("waiting")
    ready.wait_on(waiting, ids)
    waiting.launch(lambda: gated.seen.append("second"), reads=(), writes=())
    event = waiting.record()
    gated.device.wait_for_progress(0.01)
    assert not event.is_done()
    gated.open()
    waiting.synchronize()
    assert gated.seen == ["first", "second"]


def test_done_events_do_not_pile_up_and_others_stay(gated: _Gated) -> None:
    ready = ReadyEvents()
    event = gated.held.record()
    event_id = ready.register(event)
    done = gated.done.record()
    ids = [ready.register(done) for _ in range(10 * SWEEP_INTERVAL_EVENTS)]
    assert len(set(ids)) == len(ids), "ids are never used again"
    assert len(ready._events) <= SWEEP_INTERVAL_EVENTS + 1
    assert ready.outstanding(_ids(event_id)) == [event]
