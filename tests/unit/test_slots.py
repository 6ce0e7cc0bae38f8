"""The slot allocator against sets, and the events that slots wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldpage.device.host import HostDevice
from coldpage.slots import SWEEP_INTERVAL_EVENTS, ReadyEvents, SlotAllocator
from coldpage.types import NO_PAGE

_NUM_SLOTS = 12


class _Machine(RuleBasedStateMachine):
    """Who owns which slot, as a dictionary; what is free and what is out of use, as sets."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(_NUM_SLOTS)
        self.owner: dict[int, int] = {}
        self.free = set(range(_NUM_SLOTS))
        self.used_before: set[int] = set()
        self.events = [0] * _NUM_SLOTS
        self.next_page = 1

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        got = self.slots.allocate(pages)
        assert got.dtype == np.int32
        taken = set(got.tolist())
        assert len(taken) == count
        assert taken <= self.free
        # A fresh slot is touched only when no freed one is left.
        if taken - self.used_before:
            assert not (self.free & self.used_before) - taken
        self.free -= taken
        self.used_before |= taken
        self.owner |= dict(zip(got.tolist(), pages.tolist(), strict=True))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        some = self._draw_owned(data)
        self.slots.free(np.array(some, np.int32))
        for slot in some:
            del self.owner[slot]
        self.free |= set(some)

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        some = self._draw_owned(data)[:1]
        self.slots.quarantine(np.array(some, np.int32))
        del self.owner[some[0]]

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), event_id=st.integers(1, 1000))
    def attach_an_event(self, data: st.DataObject, event_id: int) -> None:
        for slot in self._draw_owned(data):
            self.slots.event[slot] = self.events[slot] = event_id

    def _draw_owned(self, data: st.DataObject) -> list[int]:
        owned = st.sampled_from(sorted(self.owner))
        return data.draw(st.lists(owned, unique=True, min_size=1))

    @invariant()
    def they_agree(self) -> None:
        self.slots.check_integrity()
        assert self.slots.num_free == len(self.free)
        assert self.slots.num_used == len(self.owner)
        assert self.slots.num_quarantined == _NUM_SLOTS - len(self.free) - len(self.owner)
        assert self.slots.owned().tolist() == sorted(self.owner)
        assert {s: int(self.slots.page[s]) for s in self.owner} == self.owner
        # Through freeing, quarantine and the next owner.
        assert self.slots.event.tolist() == self.events


_Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_slots_are_a_set = _Machine.TestCase


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


@pytest.mark.parametrize("damage", ["twice on the list", "owner of a free slot", "lost owner"])
def test_damage_is_noticed(damage: str) -> None:
    slots = SlotAllocator(4)
    got = slots.allocate(_pages(1, 2))
    if damage == "twice on the list":
        slots.free(np.concatenate([got[:1], got[:1]]))
    elif damage == "owner of a free slot":
        slots.page[3] = 9
    else:
        slots.page[got[0]] = NO_PAGE
    with pytest.raises(AssertionError):
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
