"""Work that says only when it runs what it touches, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from coldpage.device.base import IoJob, Memory, MemoryKind, Stream
from coldpage.device.simulated import SimulatedDevice, ViolationError, ViolationKind
from coldpage.errors import DeviceError, SubmissionError
from coldpage.types import ByteRange, MemAddress

_NUM_BYTES = 4096


def _at(memory: Memory, start: int, num_bytes: int = 16) -> ByteRange:
    return ByteRange(MemAddress(memory.address + start), num_bytes)


def _copy(stream: Stream, memory: Memory, to: int, start: int) -> None:
    base = memory.address
    stream.copy(np.array([base + to]), np.array([base + start]), np.array([16]))


class _Scene:
    """A kernel on stream ``a`` that finds its page in device memory, and another stream ``b``."""

    def __init__(self, seed: int = 0, *, raise_on_violation: bool = False) -> None:
        self.device = SimulatedDevice(seed, raise_on_violation=raise_on_violation)
        self.index = self.device.allocate(64, MemoryKind.DEVICE)
        self.pages = self.device.allocate(_NUM_BYTES, MemoryKind.DEVICE)
        self.pages.array[:] = 0
        self.a = self.device.create_stream("a")
        self.b = self.device.create_stream("b")
        self.ran: list[int] = []

    def launch(self, start: int, *, is_write: bool = True) -> None:
        """Upload ``start``, then launch the kernel that goes where it says."""
        self.a.upload(self.index.address, np.array([start], np.int64).view(np.uint8))
        index, pages = self.index.array, self.pages

        def named() -> int:
            return int(index[:8].view(np.int64)[0])

        def page() -> Sequence[ByteRange]:
            return [_at(pages, named())]

        self.a.launch(
            lambda: self.ran.append(named()),
            reads=lambda: [_at(self.index, 0, 8), *(() if is_write else page())],
            writes=page if is_write else (),
        )

    def finish(self) -> list[ViolationKind]:
        self.a.synchronize()
        self.b.synchronize()
        self.index.free()
        self.pages.free()
        self.device.close()
        return [violation.kind for violation in self.device.violations]


def _copy_reads_after(s: _Scene) -> None:
    s.launch(512)
    _copy(s.b, s.pages, 1024, 520)


def _copy_writes_after(s: _Scene) -> None:
    s.launch(512, is_write=False)
    _copy(s.b, s.pages, 520, 1024)


def _copy_reads_before(s: _Scene) -> None:
    _copy(s.b, s.pages, 1024, 520)
    s.launch(512)


def _copy_behind_which_an_ordered_one_hides(s: _Scene) -> None:
    """The last write to the bytes comes after the kernel; the one before it races with it."""
    _copy(s.b, s.pages, 512, 1024)
    s.launch(512)
    s.b.wait(s.a.record())
    _copy(s.b, s.pages, 512, 1024)


def _event_too_old(s: _Scene) -> None:
    event = s.a.record()
    s.launch(512)
    s.b.wait(event)
    _copy(s.b, s.pages, 1024, 512)


def _wait_too_late(s: _Scene) -> None:
    s.launch(512)
    _copy(s.b, s.pages, 1024, 512)
    s.b.wait(s.a.record())


def _job_seen_to_end_after_the_launch(s: _Scene) -> None:
    batch = s.device.io.submit([IoJob(lambda: True, writes=(_at(s.pages, 512),))])
    s.launch(512)
    batch.synchronize()


def _host_reads_before_it_knows(s: _Scene) -> None:
    s.launch(512)
    s.device.host_access(reads=[_at(s.pages, 512)])


@pytest.mark.parametrize(
    "program",
    [
        _copy_reads_after,
        _copy_writes_after,
        _copy_reads_before,
        _copy_behind_which_an_ordered_one_hides,
        _event_too_old,
        _wait_too_late,
        _job_seen_to_end_after_the_launch,
        _host_reads_before_it_knows,
    ],
)
def test_a_race_is_found_whatever_the_schedule(program: Callable[[_Scene], None]) -> None:
    for seed in range(8):
        scene = _Scene(seed)
        program(scene)
        assert scene.finish() == [ViolationKind.RACE]
        (violation,) = scene.device.violations
        assert "launch on stream 'a' at test_simulated_late.py" in violation.sentence
        assert scene.ran == [512]


def _waits_after(s: _Scene) -> None:
    s.launch(512)
    s.b.wait(s.a.record())
    _copy(s.b, s.pages, 1024, 512)
    _copy(s.b, s.pages, 512, 1024)


def _waits_before(s: _Scene) -> None:
    _copy(s.b, s.pages, 512, 1024)
    s.a.wait(s.b.record())
    s.launch(512)


def _passes_through_the_host(s: _Scene) -> None:
    s.launch(512)
    event = s.a.record()
    while not event.is_done():
        s.device.wait_for_progress(1.0)
    s.device.host_access(writes=[_at(s.pages, 512)])
    batch = s.device.io.submit([IoJob(lambda: True, writes=(_at(s.pages, 512),))])
    batch.synchronize()
    s.launch(512)


def _goes_elsewhere(s: _Scene) -> None:
    s.launch(512)
    _copy(s.b, s.pages, 1024, 528)
    s.launch(0, is_write=False)


@pytest.mark.parametrize(
    "program", [_waits_after, _waits_before, _passes_through_the_host, _goes_elsewhere]
)
def test_ordered_work_is_silent(program: Callable[[_Scene], None]) -> None:
    for seed in range(20):
        scene = _Scene(seed)
        program(scene)
        assert scene.finish() == []


def test_an_index_that_is_reused_too_early_is_found() -> None:
    scene = _Scene()
    scene.launch(512)
    scene.b.upload(scene.index.address, np.zeros(8, np.uint8))
    assert ViolationKind.RACE in scene.finish()


def test_ranges_are_asked_for_once_and_just_before_the_work() -> None:
    scene = _Scene()
    seen: list[str] = []

    def name(what: str) -> Sequence[ByteRange]:
        seen.append(what)
        return ()

    scene.a.launch(lambda: seen.append("earlier"), reads=(), writes=())
    scene.a.launch(
        lambda: seen.append("work"),
        reads=lambda: name("reads"),
        writes=lambda: name("writes"),
    )
    assert seen == []
    assert scene.finish() == []
    assert seen == ["earlier", "reads", "writes", "work"]


@pytest.mark.parametrize("start", [-8, _NUM_BYTES - 8, 1 << 40])
def test_ranges_out_of_bounds_are_found_and_the_work_is_not_run(start: int) -> None:
    scene = _Scene()
    scene.launch(start)
    assert scene.finish() == [ViolationKind.OUT_OF_BOUNDS]
    assert scene.ran == []


def test_memory_freed_before_the_work_ran_is_found() -> None:
    for is_executed in (False, True):
        scene = _Scene()
        scene.launch(512)
        if is_executed:
            scene.device.step(10)
        scene.pages.free()
        assert scene.finish() == [ViolationKind.USE_AFTER_FREE]


def test_memory_freed_before_the_launch_is_found() -> None:
    scene = _Scene()
    scene.pages.free()
    scene.launch(512)
    assert scene.finish() == [ViolationKind.USE_AFTER_FREE]
    assert scene.ran == []


def test_a_violation_is_raised_to_who_lets_the_work_run() -> None:
    scene = _Scene(raise_on_violation=True)
    scene.launch(512)
    _copy(scene.b, scene.pages, 1024, 512)
    with pytest.raises(ViolationError, match="race: copy on stream 'b'"):
        scene.a.synchronize()
    scene.device.raise_on_violation = False
    assert scene.finish() == [ViolationKind.RACE]  # and the stream is not poisoned


def test_checks_behind_work_that_never_runs_are_made() -> None:
    scene = _Scene()
    scene.a.launch(lambda: 1 // 0, reads=(), writes=())  # type: ignore[arg-type]
    scene.a.launch(lambda: None, reads=lambda: [_at(scene.pages, 0)], writes=())
    scene.b.launch(lambda: None, reads=(), writes=[_at(scene.pages, 0)])
    other = scene.device.create_stream("other")
    other.launch(lambda: None, reads=(), writes=[_at(scene.pages, 0)])
    assert scene.device.violations == []  # not yet: the launch on a may race with them
    with pytest.raises(DeviceError):
        scene.a.synchronize()
    (violation,) = scene.device.violations
    assert "'b'" in violation.sentence
    assert "'other'" in violation.sentence


def test_a_function_that_raises_poisons_the_stream_and_holds_nothing_up() -> None:
    scene = _Scene()
    scene.a.launch(lambda: None, reads=lambda: iter(()).__next__(), writes=())
    scene.b.launch(lambda: None, reads=(), writes=[_at(scene.pages, 0)])
    with pytest.raises(DeviceError) as raised:
        scene.a.synchronize()
    assert isinstance(raised.value.__cause__, StopIteration)
    scene.b.synchronize()
    scene.index.free()
    scene.pages.free()
    scene.device.close()
    # Of the failed stream nobody can know how far it came.
    assert [v.kind for v in scene.device.violations] == [ViolationKind.LEAK]


def test_a_refused_launch_names_nothing() -> None:
    scene = _Scene()
    scene.device.fail_next_submission()
    with pytest.raises(SubmissionError):
        scene.a.launch(lambda: None, reads=lambda: [_at(scene.pages, 0)], writes=())
    scene.device.fail_next_submission("a")
    with pytest.raises(SubmissionError):
        scene.a.upload(scene.index.address, np.zeros(8, np.uint8))
    assert scene.device.counts.submissions == scene.device.counts.failed_submissions == 2
    scene.b.launch(lambda: None, reads=(), writes=[_at(scene.pages, 0), _at(scene.index, 0)])
    assert scene.finish() == []


# Uploads


def test_the_destination_of_an_upload_is_checked() -> None:
    for size, expected in [(64, [ViolationKind.RACE]), (65, [ViolationKind.OUT_OF_BOUNDS])]:
        scene = _Scene()
        scene.b.launch(lambda: None, reads=[_at(scene.index, 40)], writes=())
        scene.a.upload(scene.index.address, np.zeros(size, np.uint8))
        assert scene.finish() == expected


# Memory that changes its size


class _Growing:
    """Growable memory of 8192 bytes, and a stream."""

    def __init__(self) -> None:
        self.device = SimulatedDevice(arena_bytes=1 << 20)
        self.memory = self.device.allocate(8192, MemoryKind.DEVICE, is_growable=True)
        self.stream = self.device.create_stream("a")

    def touch(self, start: int, num_bytes: int = 16) -> None:
        self.stream.launch(lambda: None, reads=(), writes=[_at(self.memory, start, num_bytes)])

    def finish(self) -> list[ViolationKind]:
        self.stream.synchronize()
        self.memory.free()
        self.device.close()
        return [violation.kind for violation in self.device.violations]


def test_what_is_cut_off_is_freed() -> None:
    for start, num_bytes in [(4096, 16), (4090, 16), (8191, 1), (0, 8192)]:
        s = _Growing()
        s.memory.resize(4096)
        s.touch(4000)
        s.touch(start, num_bytes)
        assert s.finish() == [ViolationKind.USE_AFTER_FREE]
    s = _Growing()
    s.memory.resize(4096)
    s.touch(8190)
    assert s.finish() == [ViolationKind.OUT_OF_BOUNDS]  # there never was such a byte


def test_what_has_grown_is_new() -> None:
    s = _Growing()
    s.memory.array[:] = 1
    s.memory.resize(4096)
    s.memory.resize(12_000)
    assert (s.memory.array[:4096] == 1).all()
    assert len(set(s.memory.array[4096:].tolist()) - {1}) == 1  # junk, neither old bytes nor zeros
    assert s.memory.array[-1] != 0
    s.touch(4090)
    s.touch(11_990, 10)
    assert s.finish() == []
    s = _Growing()
    s.touch(8190)  # before it grows
    s.stream.synchronize()
    s.memory.resize(12_000)
    assert s.finish() == [ViolationKind.OUT_OF_BOUNDS]


def test_cutting_off_what_work_in_flight_uses_is_found() -> None:
    s = _Growing()
    s.touch(4090)
    s.memory.resize(4096)
    assert s.finish() == [ViolationKind.USE_AFTER_FREE]


def test_cutting_off_beside_work_in_flight_is_silent() -> None:
    s = _Growing()
    s.touch(4080)
    s.memory.resize(4096)
    s.memory.resize(16_384)
    s.touch(8192)
    s.stream.synchronize()
    s.memory.resize(100)
    assert s.finish() == []


def test_cutting_off_what_late_work_uses_is_found() -> None:
    s = _Growing()
    s.stream.launch(lambda: None, reads=(), writes=lambda: [_at(s.memory, 5000)])
    s.memory.resize(4096)
    s.memory.resize(8192)
    assert s.finish() == [ViolationKind.USE_AFTER_FREE]


def test_growth_leaves_room_for_others() -> None:
    device = SimulatedDevice(arena_bytes=1 << 20)
    first = device.allocate(1 << 18, MemoryKind.DEVICE, is_growable=True)
    assert 1 << 18 < first.max_bytes < 1 << 20
    second = device.allocate(1 << 17, MemoryKind.DEVICE, is_growable=True)
    third = device.allocate(4096, MemoryKind.DEVICE, is_growable=True)
    assert third.max_bytes == 4 * 4096
    for memory in (first, second, third):
        memory.resize(memory.max_bytes)
        with pytest.raises(DeviceError, match="can not grow to"):
            memory.resize(memory.max_bytes + 1)
        memory.free()
    device.close()
    assert device.violations == []
