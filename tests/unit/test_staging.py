"""The staging ring against a map of its bytes, on simulated streams that report every race."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldpage.device.base import Event, MemoryKind, Stream
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice, ViolationKind
from coldpage.device.simulated_stream import SimulatedEvent, SimulatedStream
from coldpage.errors import DeviceError, UsageError
from coldpage.staging import MIN_PAGE_RING_BYTES, StagingBuffer, StagingRing, page_ring_bytes
from coldpage.types import ByteRange

_ARENA_BYTES = 1 << 18


class _SeenEvent(SimulatedEvent):
    """Notes who waited for it, and with what: a stream, or None for the CPU."""

    waits: list[tuple[Stream | None, Event]]

    def synchronize(self) -> None:
        self.waits.append((None, self))
        super().synchronize()


class _SeenStream(SimulatedStream):
    """Notes what is recorded on it, waited for by it, and when the CPU waits for all of it."""

    waits: list[tuple[Stream | None, Event]]
    recorded: list[Event]
    num_synchronized: int

    def watch(self, waits: list[tuple[Stream | None, Event]]) -> None:
        self.waits, self.recorded, self.num_synchronized = waits, [], 0

    def record(self) -> SimulatedEvent:
        event = _SeenEvent(self, self._num_submitted, super().record()._clock)
        event.waits = self.waits
        self.recorded.append(event)
        return event

    def wait(self, event: Event) -> None:
        self.waits.append((self, event))
        super().wait(event)

    def synchronize(self) -> None:
        self.num_synchronized += 1
        super().synchronize()


@dataclass(eq=False)
class _Lease:
    """A lease as the model sees it."""

    buffer: StagingBuffer
    start: int
    stop: int
    owner: _SeenStream | None


class _Machine(RuleBasedStateMachine):
    """Each byte of the ring has a lease, or the event of the lease that had it last."""

    num_bytes = 250  # no multiple of anything asked for

    def __init__(self) -> None:
        super().__init__()
        self.device = SimulatedDevice(7, raise_on_violation=True, arena_bytes=_ARENA_BYTES)
        self.waits: list[tuple[Stream | None, Event]] = []
        self.streams: list[_SeenStream] = []
        for name in ("a", "b", "c"):
            stream = self.device.create_stream(name)
            # The device makes its own streams; these are the same ones, watched.
            stream.__class__ = _SeenStream
            assert isinstance(stream, _SeenStream)
            stream.watch(self.waits)
            self.streams.append(stream)
        self.ring = StagingRing(self.device, self.num_bytes, MemoryKind.PINNED)
        self.bytes: list[_Lease | Event | None] = [None] * self.num_bytes
        self.cursor = 0
        self.leases: list[_Lease] = []

    # -------------------------------------------------------------- the model

    def _is_free(self, index: int) -> bool:
        return not isinstance(self.bytes[index], _Lease)

    def _place(self, least: int, most: int, unit: int, alignment: int) -> tuple[int, int] | None:
        """Where next fit puts a lease: from the cursor on, then once more from the beginning."""
        for lower in (self.cursor, 0):
            for start in range(lower, self.num_bytes - least + 1):
                if (self.ring.base_address + start) % alignment:
                    continue
                if not all(map(self._is_free, range(start, start + least))):
                    continue
                stop = start + least
                while stop + unit <= min(self.num_bytes, start + most) and all(
                    map(self._is_free, range(stop, stop + unit))
                ):
                    stop += unit
                return start, stop
        return None

    def _events(self, start: int, stop: int) -> set[Event]:
        return {e for e in self.bytes[start:stop] if isinstance(e, Event)}

    # -------------------------------------------------------------- operations

    owners = st.sampled_from([None, 0, 1, 2])

    @rule(
        alignment=st.sampled_from([1, 2, 8, 32]),
        multiple=st.integers(1, 5),
        min_bytes=st.integers(1, 130),
        extra_bytes=st.integers(0, 130),
        owner=owners,
    )
    def acquire(
        self, alignment: int, multiple: int, min_bytes: int, extra_bytes: int, owner: int | None
    ) -> None:
        unit = alignment * multiple
        least = -(-min_bytes // unit) * unit
        most = (least + extra_bytes) // unit * unit
        stream = None if owner is None else self.streams[owner]
        expected = self._place(least, most, unit, alignment)
        self.waits.clear()
        num_synchronized = [s.num_synchronized for s in self.streams]
        buffer = self.ring.acquire(min_bytes, least + extra_bytes, unit, alignment, stream)
        assert [s.num_synchronized for s in self.streams] == num_synchronized
        if expected is None:
            assert buffer is None
            assert not self.waits, "a refusal waits for nothing"
            return
        assert buffer is not None
        start, stop = expected
        assert (buffer.address, buffer.num_bytes) == (
            self.ring.base_address + start,
            stop - start,
        )
        assert buffer.stream is stream
        assert sorted(map(id, (e for _, e in self.waits))) == sorted(
            map(id, self._events(start, stop))
        ), "exactly the previous owners, each once"
        assert all(who is stream for who, _ in self.waits)
        lease = _Lease(buffer, start, stop, stream)
        self.bytes[start:stop] = [lease] * (stop - start)
        self.cursor = stop if stop < self.num_bytes else 0
        self.leases.append(lease)
        self._use(lease)

    def _use(self, lease: _Lease) -> None:
        everything = ByteRange(lease.buffer.address, lease.buffer.num_bytes)
        if lease.owner is None:
            self.device.host_access(writes=[everything])
        else:
            lease.owner.launch(lambda: None, reads=(), writes=[everything])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), owner=owners)
    def set_stream(self, data: st.DataObject, owner: int | None) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        old, new = lease.owner, None if owner is None else self.streams[owner]
        self.waits.clear()
        num_recorded = [len(s.recorded) for s in self.streams]
        num_synchronized = [s.num_synchronized for s in self.streams]
        lease.buffer.set_stream(new)
        recorded = [len(s.recorded) - n for s, n in zip(self.streams, num_recorded, strict=True)]
        synchronized = [
            s.num_synchronized - n for s, n in zip(self.streams, num_synchronized, strict=True)
        ]
        moves = old is not None and new is not None and old is not new
        assert recorded == [int(moves and s is old) for s in self.streams]
        assert self.waits == ([(new, old.recorded[-1])] if moves and old else [])
        assert synchronized == [int(new is None and s is old) for s in self.streams]
        assert lease.buffer.stream is new
        lease.owner = new
        self._use(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def use_again(self, data: st.DataObject) -> None:
        self._use(data.draw(st.sampled_from(self.leases)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_with=st.booleans())
    def release(self, data: st.DataObject, is_with: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if is_with:
            with lease.buffer as entered:
                assert entered is lease.buffer
        else:
            lease.buffer.release()
        event = None if lease.owner is None else lease.owner.recorded[-1]
        self.bytes = [event if b is lease else b for b in self.bytes]
        self.leases.remove(lease)
        with pytest.raises(UsageError, match="released twice"):
            lease.buffer.release()

    @rule(num_ops=st.integers(1, 5))
    def time_passes(self, num_ops: int) -> None:
        self.device.step(num_ops)

    @invariant()
    def they_agree(self) -> None:
        self.ring.check_integrity()
        assert self.ring.num_live == len(self.leases)
        assert self.ring.live_bytes == sum(le.stop - le.start for le in self.leases)
        assert set(self.ring.retired_events()) == self._events(0, self.num_bytes)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.buffer.release()
        self.waits.clear()
        events = set(self.ring.retired_events())
        self.ring.close()
        assert {e for who, e in self.waits if who is None} == events
        for stream in self.streams:
            stream.synchronize()
        self.device.close()
        assert not self.device.violations


_Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
test_the_ring_is_a_map_of_bytes = _Machine.TestCase


# ---------------------------------------------------------------------- every wait is needed


class _Scene:
    """A ring of 64 bytes in which every kind of wait happens once, and is needed."""

    def __init__(self, ignored: set[tuple[str, int]]) -> None:
        self.device = SimulatedDevice(3, arena_bytes=_ARENA_BYTES)
        self.device.ignored_wait_sites |= ignored
        self.a, self.b = self.device.create_stream("a"), self.device.create_stream("b")
        self.ring = StagingRing(self.device, 64, MemoryKind.PINNED)

    def _whole(self, stream: Stream | None) -> StagingBuffer:
        buffer = self.ring.acquire(64, 64, 64, 64, stream)
        assert buffer is not None
        self._write(buffer)
        return buffer

    def _write(self, buffer: StagingBuffer) -> None:
        everything = ByteRange(buffer.address, buffer.num_bytes)
        if buffer.stream is None:
            self.device.host_access(writes=[everything])
        else:
            buffer.stream.launch(lambda: None, reads=(), writes=[everything])

    def run(self) -> None:
        self._whole(self.a).release()
        self._whole(self.b).release()  # the stream waits for the last owner
        with self._whole(None) as buffer:  # the CPU waits for the last owner
            buffer.set_stream(self.a)
            self._write(buffer)
            buffer.set_stream(self.b)  # stream to stream
            self._write(buffer)
            buffer.set_stream(None)  # stream to CPU
            self._write(buffer)
        self._whole(self.a).release()
        self.ring.close()  # the memory goes after its last owner

    def kinds(self) -> set[ViolationKind]:
        return {v.kind for v in self.device.violations}


def _staging_waits(device: SimulatedDevice) -> set[tuple[str, int]]:
    return {site for site in device.wait_sites if site[0] == "staging.py"}


def test_with_all_waits_nothing_races_and_without_any_one_something_does() -> None:
    sound = _Scene(set())
    sound.run()
    assert sound.kinds() == set()
    sites = _staging_waits(sound.device)
    assert len(sites) == 5, "acquire and set_stream for a stream and for the CPU, and close"
    assert sites <= sound.device.ordering_wait_sites
    for site in sorted(sites):
        broken = _Scene({site})
        broken.run()
        assert broken.kinds() & {ViolationKind.RACE, ViolationKind.USE_AFTER_FREE}, site


# ---------------------------------------------------------------------- by example


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(1, raise_on_violation=True, arena_bytes=_ARENA_BYTES)


def _take(ring: StagingRing, num_bytes: int, stream: Stream | None = None) -> StagingBuffer:
    buffer = ring.acquire(num_bytes, num_bytes, num_bytes, 1, stream)
    assert buffer is not None
    return buffer


def _offset(ring: StagingRing, buffer: StagingBuffer | None) -> int:
    assert buffer is not None
    return buffer.address - ring.base_address


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, 1, 1, 0), "alignment 0 is not a power of two"),
        ((1, 1, 3, 3), "alignment 3 is not a power of two"),
        ((1, 1, 4, -4), "alignment -4 is not a power of two"),
        ((1, 1, 0, 1), "granularity 0 is not a positive multiple of 1"),
        ((1, 1, 12, 8), "granularity 12 is not a positive multiple of 8"),
        ((0, 8, 8, 8), r"no multiple of 8 lies in \[0, 8\]"),
        ((-8, 8, 8, 8), r"no multiple of 8 lies in \[-8, 8\]"),
        ((9, 15, 8, 8), r"no multiple of 8 lies in \[9, 15\]"),
        ((16, 8, 8, 8), r"no multiple of 8 lies in \[16, 8\]"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(
    arguments: tuple[int, int, int, int], sentence: str, device: SimulatedDevice
) -> None:
    ring = StagingRing(device, 64, MemoryKind.PINNED)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        ring.acquire(*arguments, None)
    assert ring.num_live == 0
    ring.close()


def test_the_size_is_the_largest_multiple_that_fits_the_run(device: SimulatedDevice) -> None:
    ring = StagingRing(device, 100, MemoryKind.PINNED)
    buffer = ring.acquire(1, 1000, 12, 4, None)
    assert buffer is not None
    assert buffer.num_bytes == 96
    assert ring.acquire(5, 1000, 5, 1, None) is None, "four bytes of slack are too few"
    buffer.release()
    ring.close()


def test_the_cursor_moves_on_and_wraps_once(device: SimulatedDevice) -> None:
    ring = StagingRing(device, 100, MemoryKind.PINNED)
    first, second = _take(ring, 30), _take(ring, 30)
    first.release()
    third = _take(ring, 30)
    assert _offset(ring, third) == 60, "the freed bytes before the cursor are not next"
    fourth = _take(ring, 30)
    assert _offset(ring, fourth) == 0, "ten bytes at the end are too few"
    assert ring.acquire(30, 30, 30, 1, None) is None
    second.release()
    # A refusal leaves the cursor where it was.
    assert ring.acquire(31, 31, 31, 1, None) is None
    assert _offset(ring, _take(ring, 15)) == 30
    assert ring.live_bytes == 75


def test_a_run_across_the_cursor_is_found_in_the_second_pass(device: SimulatedDevice) -> None:
    ring = StagingRing(device, 100, MemoryKind.PINNED)
    _take(ring, 50).release()
    buffer = _take(ring, 60)
    assert _offset(ring, buffer) == 0
    buffer.release()
    ring.close()


def test_padding_keeps_the_event_of_each_old_owner(device: SimulatedDevice) -> None:
    a, b, c = (device.create_stream(name) for name in "abc")
    ring = StagingRing(device, 96, MemoryKind.PINNED)
    _take(ring, 10).release()
    _take(ring, 10, a).release()
    _take(ring, 10, b).release()
    event_a, event_b = ring.retired_events()
    _take(ring, 66).release()
    _take(ring, 15).release()  # the CPU has waited for a; half of a's bytes are its own now
    aligned = ring.acquire(32, 32, 32, 32, c)
    assert _offset(ring, aligned) == 32
    assert list(ring.retired_events()) == [event_a, event_b]
    assert aligned is not None
    aligned.release()
    for stream in (a, b, c):
        stream.synchronize()
    ring.close()


def test_an_owner_that_failed_to_wait_does_not_cost_the_ring_its_bytes() -> None:
    device = HostDevice()
    stream = device.create_stream("poisoned")
    ring = StagingRing(device, 64, MemoryKind.PINNED)
    other = device.create_stream("other")
    _take(ring, 64, other).release()
    stream.launch(lambda: 1 // 0 and None, reads=(), writes=())
    with pytest.raises(DeviceError):
        stream.synchronize()
    with pytest.raises(DeviceError):
        _take(ring, 64, stream)
    assert ring.num_live == 0
    _take(ring, 64, other).release()
    ring.close()
    device.close()


def test_only_what_the_device_has_prepared_is_leased() -> None:
    device = SimulatedDevice(prepares_in_background=True)
    ring = StagingRing(device, 1000, MemoryKind.PINNED)
    assert ring.acquire(1, 1000, 1, 1, None) is None
    device.prepare(300)
    assert ring.num_ready_bytes == 300
    assert ring.acquire(301, 1000, 1, 1, None) is None
    first = _take(ring, 200)
    second = ring.acquire(1, 1000, 1, 1, None)
    assert second is not None
    assert (_offset(ring, second), second.num_bytes) == (200, 100)
    device.prepare(700)
    third = ring.acquire(1, 1000, 1, 1, None)
    assert third is not None
    assert (_offset(ring, third), third.num_bytes) == (300, 700)
    for lease in (first, second, third):
        lease.release()
    ring.check_integrity()
    ring.close()


def test_closing_with_a_lease_out_is_a_bug(device: SimulatedDevice) -> None:
    ring = StagingRing(device, 64, MemoryKind.PINNED)
    buffer = _take(ring, 8)
    with pytest.raises(AssertionError, match="a staging lease outlives its ring"):
        ring.close()
    buffer.release()
    ring.close()


def test_a_with_statement_releases_after_an_error_and_after_a_release(
    device: SimulatedDevice,
) -> None:
    ring = StagingRing(device, 64, MemoryKind.PINNED)
    with pytest.raises(ZeroDivisionError), _take(ring, 8):
        raise ZeroDivisionError
    with _take(ring, 8) as buffer:
        buffer.release()
    assert ring.num_live == 0
    ring.close()


@pytest.mark.parametrize(
    ("page_bytes", "ring_bytes"),
    [
        (1, MIN_PAGE_RING_BYTES),
        (MIN_PAGE_RING_BYTES // 3, MIN_PAGE_RING_BYTES),
        (MIN_PAGE_RING_BYTES // 3 + 1, MIN_PAGE_RING_BYTES + 2),
        (1 << 40, 3 << 40),
    ],
)
def test_the_page_ring_holds_three_of_the_largest_pages(page_bytes: int, ring_bytes: int) -> None:
    assert MIN_PAGE_RING_BYTES == 64 * 1024 * 1024
    assert page_ring_bytes(page_bytes) == ring_bytes
