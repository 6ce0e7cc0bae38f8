"""The simulated device finds what is wrong, and is silent on what is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from coldpage.device.base import IoJob, Memory, MemoryKind, Stream
from coldpage.device.simulated import (
    SimulatedDevice,
    SimulatedFaults,
    ViolationError,
    ViolationKind,
)
from coldpage.errors import DeviceError, SubmissionError
from coldpage.types import ByteRange, MemAddress


def _at(memory: Memory, start: int, num_bytes: int = 16) -> ByteRange:
    return ByteRange(MemAddress(memory.address + start), num_bytes)


def _copy(stream: Stream, memory: Memory, to: int, start: int, num_bytes: int = 16) -> None:
    stream.copy(
        np.array([memory.address + to]), np.array([memory.address + start]), np.array([num_bytes])
    )


def _nothing() -> None:
    pass


def _note(seen: list[Any], what: object) -> bool:
    seen.append(what)
    return True


def _kinds(device: SimulatedDevice) -> list[ViolationKind]:
    return [violation.kind for violation in device.violations]


class _Scene:
    """A device with one memory, two streams and one job, ready to go wrong."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        self.device = SimulatedDevice(seed, **settings)
        self.memory = self.device.allocate(4096, MemoryKind.DEVICE)
        self.a = self.device.create_stream("a")
        self.b = self.device.create_stream("b")

    def launch(
        self, stream: Stream, *, reads: int | None = None, writes: int | None = None
    ) -> None:
        stream.launch(
            _nothing,
            reads=[] if reads is None else [_at(self.memory, reads)],
            writes=[] if writes is None else [_at(self.memory, writes)],
        )

    def job(self, *, reads: int | None = None, writes: int | None = None) -> IoJob:
        return IoJob(
            lambda: True,
            reads=() if reads is None else (_at(self.memory, reads),),
            writes=() if writes is None else (_at(self.memory, writes),),
        )

    def finish(self) -> list[ViolationKind]:
        self.a.synchronize()
        self.b.synchronize()
        self.memory.free()
        self.device.close()
        return _kinds(self.device)


# Races


def _write_read(s: _Scene) -> None:
    s.launch(s.a, writes=0)
    s.launch(s.b, reads=8)


def _read_write(s: _Scene) -> None:
    s.launch(s.a, reads=0)
    s.launch(s.b, writes=8)


def _write_write(s: _Scene) -> None:
    s.launch(s.a, writes=8)
    s.launch(s.b, writes=0)


def _copies(s: _Scene) -> None:
    _copy(s.a, s.memory, 0, 1024)
    _copy(s.b, s.memory, 2048, 0)


def _io_before_stream(s: _Scene) -> None:
    s.device.io.submit([s.job(writes=0)])
    s.launch(s.a, reads=0)


def _stream_before_io(s: _Scene) -> None:
    s.launch(s.a, reads=0)
    s.device.io.submit([s.job(writes=0)])


def _jobs_of_one_batch(s: _Scene) -> None:
    s.device.io.submit([s.job(writes=0), s.job(reads=0)])


def _jobs_of_two_batches(s: _Scene) -> None:
    s.device.io.submit([s.job(writes=0)])
    s.device.io.submit([s.job(writes=0)])


def _host_reads_early(s: _Scene) -> None:
    s.launch(s.a, writes=0)
    s.device.host_access(reads=[_at(s.memory, 0)])


def _host_writes_early(s: _Scene) -> None:
    s.launch(s.a, reads=0)
    s.device.host_access(writes=[_at(s.memory, 0)])


def _event_too_old(s: _Scene) -> None:
    event = s.a.record()
    s.launch(s.a, writes=0)
    s.b.wait(event)
    s.launch(s.b, reads=0)


def _wrong_stream_waits(s: _Scene) -> None:
    s.launch(s.a, writes=0)
    event = s.a.record()
    other = s.device.create_stream("other")
    other.wait(event)
    s.launch(s.b, reads=0)
    other.synchronize()  # too late: the access was submitted before


def _older_reader(s: _Scene) -> None:
    s.launch(s.a, reads=0)
    s.launch(s.b, reads=0)
    s.b.synchronize()
    s.device.host_access(writes=[_at(s.memory, 0)])


@pytest.mark.parametrize(
    "program",
    [
        _write_read,
        _read_write,
        _write_write,
        _copies,
        _io_before_stream,
        _stream_before_io,
        _jobs_of_one_batch,
        _jobs_of_two_batches,
        _host_reads_early,
        _host_writes_early,
        _event_too_old,
        _wrong_stream_waits,
        _older_reader,
    ],
)
def test_a_race_is_found_whatever_the_schedule(program: Callable[[_Scene], None]) -> None:
    for seed in range(5):
        scene = _Scene(seed)
        program(scene)
        (violation,) = scene.device.violations
        assert violation.kind is ViolationKind.RACE
        assert len(violation.sites) == 2
        assert all("test_simulated_device.py" in site for site in violation.sites)
        assert str(violation).count("test_simulated_device.py") >= 2


@pytest.mark.parametrize(("to", "start"), [(0, 8), (8, 0)])
def test_a_copy_that_overlaps_itself_is_found(to: int, start: int) -> None:
    scene = _Scene()
    _copy(scene.a, scene.memory, to, start)
    assert scene.finish() == [ViolationKind.RACE]


def test_two_destinations_that_overlap_are_found() -> None:
    scene = _Scene()
    base = scene.memory.address
    scene.a.copy(base + np.array([0, 15]), base + np.array([100, 200]), np.array([16, 16]))
    assert scene.finish() == [ViolationKind.RACE]


# Silence


def test_ordered_accesses_are_silent() -> None:
    for seed in range(20):
        s = _Scene(seed)
        s.memory.array[:] = 0
        s.launch(s.a, writes=0)
        s.launch(s.a, reads=0)
        s.b.wait(s.a.record())
        s.launch(s.b, writes=0)
        s.launch(s.a, writes=16)  # a neighbour
        event = s.b.record()
        while not event.is_done():
            s.device.wait_for_progress(1.0)
        s.device.host_access(reads=[_at(s.memory, 0)], writes=[_at(s.memory, 0)])
        batch = s.device.io.submit([s.job(reads=0), s.job(reads=0)])
        while not batch.is_done():
            s.device.wait_for_progress(1.0)
        s.launch(s.b, writes=0)
        assert s.finish() == []


def test_order_passes_through_a_third_stream() -> None:
    s = _Scene()
    third = s.device.create_stream("third")
    s.launch(s.a, writes=0)
    third.wait(s.a.record())
    s.b.wait(third.record())
    s.launch(s.b, writes=0)
    third.synchronize()
    assert s.finish() == []


# Lifetime


def test_use_after_free_is_found() -> None:
    s = _Scene()
    other = s.device.allocate(64, MemoryKind.DEVICE)
    other.free()
    s.a.launch(lambda: 1 // 0, reads=[_at(other, 0)], writes=())  # type: ignore[arg-type]
    assert s.finish() == [ViolationKind.USE_AFTER_FREE]  # and the work was not run


@pytest.mark.parametrize("is_executed", [False, True])
def test_freeing_what_work_in_flight_uses_is_found(is_executed: bool) -> None:
    s = _Scene()
    other = s.device.allocate(64, MemoryKind.DEVICE)
    s.a.launch(_nothing, reads=[_at(other, 0)], writes=())
    if is_executed:
        assert s.device.step(10) == 1  # that it has run by luck proves nothing
    other.free()
    assert s.finish() == [ViolationKind.USE_AFTER_FREE]


def test_freeing_after_a_wait_is_silent() -> None:
    s = _Scene()
    other = s.device.allocate(64, MemoryKind.DEVICE)
    s.a.launch(_nothing, reads=(), writes=[_at(other, 0)])
    s.a.record().synchronize()
    other.free()
    assert s.finish() == []


@pytest.mark.parametrize(
    ("start", "num_bytes"), [(4096 - 8, 16), (-8, 16), (5000, 4), (1 << 40, 1)]
)
def test_out_of_bounds_is_found(start: int, num_bytes: int) -> None:
    s = _Scene()
    s.device.allocate(64, MemoryKind.DEVICE).free()
    _copy(s.a, s.memory, 1024, start, num_bytes)
    assert s.finish() == [ViolationKind.OUT_OF_BOUNDS]  # and nothing crashed


def test_leaks_are_found() -> None:
    s = _Scene()
    s.launch(s.a, writes=0)
    s.device.io.submit([s.job(writes=32)])
    s.device.step(10)
    s.device.close()
    assert _kinds(s.device) == [ViolationKind.LEAK] * 3
    assert sorted(str(v).split()[1] for v in s.device.violations) == ["4096", "nobody", "nobody"]


def test_a_violation_can_be_raised_where_it_is_found() -> None:
    s = _Scene(raise_on_violation=True)
    s.launch(s.a, writes=0)
    with pytest.raises(ViolationError, match="race: launch on stream 'b'"):
        s.launch(s.b, reads=0)
    assert s.b.record().is_done()  # nothing was enqueued
    s.device.raise_on_violation = False
    s.finish()


def test_a_violation_is_reported_once_a_pair_of_places() -> None:
    s = _Scene()
    for _ in range(10):
        s.launch(s.a, writes=0)
        s.launch(s.b, writes=0)
    assert 1 <= len(s.device.violations) <= 2


# Waits taken out


def _pipeline(device: SimulatedDevice) -> None:
    """Disk to host to hot, with a wait of each sort."""
    memory = device.allocate(4096, MemoryKind.DEVICE)
    up, compute = device.create_stream("up"), device.create_stream("compute")
    batch = device.io.submit([IoJob(lambda: True, writes=(_at(memory, 0),))])
    while not batch.is_done():
        device.wait_for_progress(1.0)
    _copy(up, memory, 16, 0)
    compute.wait(up.record())
    _copy(compute, memory, 32, 16)
    compute.record().synchronize()
    device.host_access(reads=[_at(memory, 32)])
    up.launch(_nothing, reads=(), writes=[_at(memory, 32)])
    up.synchronize()
    memory.free()
    device.close()


def test_each_wait_taken_out_is_caught() -> None:
    device = SimulatedDevice()
    _pipeline(device)
    assert device.violations == []
    assert len(device.ordering_wait_sites) == 4
    assert device.ordering_wait_sites == device.wait_sites
    for site in device.wait_sites:
        assert site[0] == "test_simulated_device.py"
        broken = SimulatedDevice()
        broken.ignored_wait_sites.add(site)
        _pipeline(broken)
        assert broken.violations, f"without the wait at {site}"


def test_an_ignored_stream_wait_is_not_made() -> None:
    device = SimulatedDevice()
    a, b = device.create_stream("a"), device.create_stream("b")
    seen: list[str] = []

    def run() -> list[str]:
        seen.clear()
        a.launch(lambda: seen.append("a"), reads=(), writes=())
        b.wait(a.record())
        b.launch(lambda: seen.append("b"), reads=(), writes=())
        b.synchronize()
        a.synchronize()
        return list(seen)

    assert all(run() == ["a", "b"] for _ in range(20))
    device.ignored_wait_sites |= device.wait_sites
    assert any(run() == ["b", "a"] for _ in range(20))


# Faults


def test_planned_submission_failures() -> None:
    s = _Scene()
    s.device.fail_next_submission("b", 2)
    s.launch(s.a, writes=0)
    for _ in range(2):
        with pytest.raises(SubmissionError):
            s.launch(s.b, writes=0)
    s.device.fail_next_submission()
    with pytest.raises(SubmissionError):
        _copy(s.a, s.memory, 64, 128)
    s.launch(s.b, writes=256)
    assert s.device.counts.failed_submissions == 3
    assert s.device.counts.submissions == 5
    assert s.finish() == []  # what was refused did not count as an access


def test_random_faults_are_seeded_and_counted() -> None:
    def run(seed: int) -> tuple[list[bool], list[bool], int]:
        faults = SimulatedFaults(
            submission_failure_rate=0.3, io_failure_rate=0.3, io_delay_rate=0.5, io_delay_rounds=9
        )
        s = _Scene(seed, faults=faults)
        refused = []
        for index in range(100):
            try:
                s.launch(s.a, reads=16 * index)
                refused.append(False)
            except SubmissionError:
                refused.append(True)
        ran: list[int] = []
        jobs = [IoJob(partial(_note, ran, index)) for index in range(100)]
        batch = s.device.io.submit(jobs)
        batch.synchronize()
        assert sorted(ran) == np.flatnonzero(batch.ok).tolist()
        counts = s.device.counts
        assert counts.failed_submissions == sum(refused)
        assert counts.failed_io_jobs == 100 - len(ran)
        assert counts.executed_io_jobs == len(ran)
        assert 20 < counts.delayed_io_jobs < 80
        assert s.finish() == []
        return refused, batch.ok.tolist(), counts.delayed_io_jobs

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_held_disk_holds_nothing_else() -> None:
    s = _Scene()
    s.device.faults.is_io_held = True
    batch = s.device.io.submit([s.job(writes=0)])
    s.launch(s.a, writes=512)
    s.a.synchronize()
    for _ in range(50):
        s.device.wait_for_progress(1.0)
        assert not batch.is_done()
    s.device.faults.is_io_held = False
    batch.synchronize()
    assert s.finish() == []


def test_a_delayed_job_is_overtaken() -> None:
    s = _Scene(faults=SimulatedFaults(io_delay_rate=1.0, io_delay_rounds=10_000))
    seen: list[str] = []
    slow = s.device.io.submit([IoJob(partial(_note, seen, "slow"))])
    s.device.faults.io_delay_rate = 0.0
    fast = s.device.io.submit([IoJob(partial(_note, seen, "fast"))] * 20)
    slow.synchronize()
    fast.synchronize()
    assert seen == ["fast"] * 20 + ["slow"]
    assert s.finish() == []


def test_all_memory_taken_is_a_device_error() -> None:
    device = SimulatedDevice(arena_bytes=16384)
    device.allocate(8192, MemoryKind.DEVICE).free()
    with pytest.raises(DeviceError):
        device.allocate(8192, MemoryKind.DEVICE)  # freed addresses are not used again


# Schedules


def _schedule(seed: int) -> list[str]:
    s = _Scene(seed)
    seen: list[str] = []
    for index in range(4):
        for stream in (s.a, s.b):
            what = f"{stream.name}{index}"
            stream.launch(lambda what=what: seen.append(what), reads=(), writes=())  # type: ignore[misc]
        s.device.io.submit([IoJob(partial(_note, seen, f"io{index}"))])
    assert seen == []  # nothing runs before someone asks
    while s.device.step():
        pass
    return seen


def test_a_seed_is_a_schedule() -> None:
    schedules = [_schedule(seed) for seed in range(20)]
    assert schedules == [_schedule(seed) for seed in range(20)]
    assert len({tuple(schedule) for schedule in schedules}) == 20
    for schedule in schedules:
        for name in "ab":
            own = [what for what in schedule if what.startswith(name)]
            assert own == sorted(own)
    jobs = [[what for what in schedule if what.startswith("io")] for schedule in schedules]
    assert any(own != sorted(own) for own in jobs)


def test_threads_bound_how_far_jobs_overtake() -> None:
    for seed in range(20):
        device = SimulatedDevice(seed, num_io_threads=2)
        seen: list[int] = []
        jobs = [IoJob(partial(_note, seen, index)) for index in range(20)]
        device.io.submit(jobs).synchronize()
        for place, index in enumerate(seen):
            assert index <= place + 1
        device.close()


def test_checks_stay_fast() -> None:
    device = SimulatedDevice()
    num_slots, page_bytes, pages_per_move = 500, 4096, 50
    hot = device.allocate(num_slots * page_bytes, MemoryKind.DEVICE)
    cold = device.allocate(num_slots * page_bytes, MemoryKind.PINNED)
    streams = [device.create_stream(name) for name in ("up", "down", "compute")]
    rng = np.random.default_rng(0)
    size = np.full(pages_per_move, page_bytes)
    num_moves = 400
    started = time.perf_counter()
    for move in range(num_moves):
        slots = rng.permutation(num_slots)[:pages_per_move] * page_bytes
        dst, src = (hot, cold) if move % 2 else (cold, hot)
        stream = streams[move % 3]
        stream.copy(dst.address + slots, src.address + slots, size)
        event = stream.record()
        for other in streams:
            other.wait(event)
        if move % 10 == 0:
            event.synchronize()
    num_accesses = 2 * num_moves * pages_per_move
    us_per_access = (time.perf_counter() - started) / num_accesses * 1e6
    assert device.violations == []
    assert us_per_access < 50, f"{us_per_access:.1f} us"
