"""What every device promises, as tests: subclass ``DeviceConformance`` and run it with pytest."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from coldpage.device.base import Completion, Device, IoJob, Memory, MemoryKind, Stream
from coldpage.errors import ClosedError, DeviceError, SubmissionError, UsageError
from coldpage.types import ByteRange, MemAddress

__all__ = ["DeviceConformance"]

_NUM_BYTES = 64 * 1024
# Long enough that a device which forgets to wait is caught, short enough not to be noticed.
_SLOW_S = 0.02
_DEADLINE_S = 20.0


class DeviceConformance:
    """Tests of one device. The subclass makes it."""

    def make_device(self) -> Device:
        """A new device."""
        raise NotImplementedError

    def check_closed_device(self, device: Device) -> None:
        """Called with each device after its ``close``."""

    def inject_submission_failure(self, device: Device) -> bool:
        """Make the next submission fail; False where that can not be arranged."""
        return False

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """The device under test, closed and checked afterwards."""
        device = self.make_device()
        yield device
        device.close()
        self.check_closed_device(device)

    # Memory

    def test_memory_is_aligned_writable_and_apart(self, device: Device) -> None:
        memories = [
            device.allocate(size, kind) for size in (1, 4097, 100_000) for kind in MemoryKind
        ]
        for value, memory in enumerate(memories):
            assert memory.address % 4096 == 0
            assert memory.array.shape == (memory.num_bytes,)
            memory.array[:] = value
        for value, memory in enumerate(memories):
            assert (memory.array == value).all()
            memory.free()

    def test_too_much_memory_is_refused(self, device: Device) -> None:
        with pytest.raises(DeviceError):
            device.allocate(1 << 60, MemoryKind.DEVICE)

    # Copies

    @pytest.mark.parametrize("seed", range(4))
    def test_copies_of_any_size_and_alignment(self, device: Device, seed: int) -> None:
        rng = np.random.default_rng(seed)
        src, dst = _filled(device, seed), _filled(device, seed + 100)
        expected = dst.array.copy()
        sizes = rng.integers(0, 1500, size=64)
        starts = np.concatenate(([0], np.cumsum(sizes + rng.integers(0, 40, size=64))))[:-1]
        sources = rng.integers(0, _NUM_BYTES - 1500, size=64)
        for start, source, size in zip(starts, sources, sizes, strict=True):
            expected[start : start + size] = src.array[source : source + size]
        stream = device.create_stream("copy")
        stream.copy(dst.address + starts, src.address + sources, sizes)
        stream.synchronize()
        np.testing.assert_array_equal(dst.array, expected)
        _free(src, dst)

    def test_neighbouring_copies(self, device: Device) -> None:
        src, dst = _filled(device, 1), _filled(device, 2)
        starts = np.arange(0, 8 * 512, 512)
        order = np.array([0, 1, 2, 5, 6, 4, 7, 3])
        expected = dst.array.copy()
        expected[: 8 * 512] = src.array[: 8 * 512].reshape(8, 512)[order].reshape(-1)
        stream = device.create_stream("copy")
        stream.copy(dst.address + starts, src.address + starts[order], np.full(8, 512))
        stream.synchronize()
        np.testing.assert_array_equal(dst.array, expected)
        _free(src, dst)

    def test_nothing_to_copy(self, device: Device) -> None:
        stream = device.create_stream("copy")
        none = np.zeros(0, dtype=np.int64)
        stream.copy(none, none, none)
        stream.synchronize()

    def test_copy_consumes_its_arrays(self, device: Device) -> None:
        src, dst = _filled(device, 1), _filled(device, 2)
        expected = src.array[:100].copy()
        stream = device.create_stream("copy")
        stream.launch(_sleep, reads=(), writes=())
        arrays = [np.array([value]) for value in (dst.address, src.address, 100)]
        stream.copy(*arrays)
        for array in arrays:
            array[:] = 0
        stream.synchronize()
        np.testing.assert_array_equal(dst.array[:100], expected)
        _free(src, dst)

    # Order

    def test_work_on_a_stream_runs_in_order(self, device: Device) -> None:
        stream = device.create_stream("order")
        seen: list[int] = []
        for index in range(200):
            stream.launch(lambda index=index: seen.append(index), reads=(), writes=())  # type: ignore[misc]
        stream.synchronize()
        assert seen == list(range(200))

    def test_copies_and_work_on_a_stream_keep_their_order(self, device: Device) -> None:
        memory = device.allocate(4096, MemoryKind.DEVICE)
        stream = device.create_stream("order")
        array = memory.array

        def fill(value: int) -> None:
            array[:16] = value

        for value in range(1, 21):
            stream.launch(
                lambda value=value: fill(value),  # type: ignore[misc]
                reads=(),
                writes=[_range(memory, 0, 16)],
            )
            _copy(stream, memory, 16 * value, memory, 0, 16)
        stream.synchronize()
        assert array[16 : 16 * 21 : 16].tolist() == list(range(1, 21))
        memory.free()

    def test_a_stream_waits_for_anothers_event(self, device: Device) -> None:
        memory = device.allocate(4096, MemoryKind.DEVICE)
        memory.array[:] = 0
        producer, consumer = device.create_stream("producer"), device.create_stream("consumer")
        _launch_slow_fill(producer, memory, 7)
        consumer.wait(producer.record())
        _copy(consumer, memory, 2048, memory, 0, 16)
        consumer.synchronize()
        assert (memory.array[2048:2064] == 7).all()
        memory.free()

    def test_an_event_leaves_out_later_work(self, device: Device) -> None:
        stream = device.create_stream("later")
        before = stream.record()
        assert before.is_done()
        seen: list[int] = []
        stream.launch(lambda: seen.append(1), reads=(), writes=())
        event = stream.record()
        stream.launch(_sleep, reads=(), writes=())
        stream.launch(lambda: seen.append(2), reads=(), writes=())
        event.synchronize()
        assert seen[0] == 1
        assert event.is_done()
        stream.synchronize()
        assert seen == [1, 2]
        assert event.is_done()

    def test_streams_that_wait_for_each_other_in_turn(self, device: Device) -> None:
        streams = [device.create_stream(f"ring{index}") for index in range(3)]
        seen: list[int] = []
        for index in range(60):
            stream = streams[index % 3]
            stream.launch(lambda index=index: seen.append(index), reads=(), writes=())  # type: ignore[misc]
            event = stream.record()
            for other in streams:
                other.wait(event)
        for stream in streams:
            stream.synchronize()
        assert seen == list(range(60))

    def test_progress_wakes_the_waiter(self, device: Device) -> None:
        stream = device.create_stream("progress")
        stream.launch(_sleep, reads=(), writes=())
        _wait(device, stream.record())
        _wait(device, device.io.submit([IoJob(_sleep_well)]))
        stream.synchronize()

    # I/O

    def test_each_io_job_has_its_result(self, device: Device) -> None:
        expected = [index % 3 != 0 for index in range(50)]
        batch = device.io.submit([IoJob(lambda good=good: good) for good in expected])  # type: ignore[misc]
        batch.synchronize()
        assert batch.is_done()
        assert batch.ok.tolist() == expected

    def test_an_empty_io_batch_is_done(self, device: Device) -> None:
        batch = device.io.submit([])
        assert batch.is_done()
        assert batch.ok.shape == (0,)

    def test_io_results_are_not_read_early(self, device: Device) -> None:
        batch = device.io.submit([IoJob(_sleep_well)] * 3)
        with pytest.raises(UsageError):
            _ = batch.ok
        batch.synchronize()
        assert batch.ok.all()

    def test_io_and_streams_hand_over_memory(self, device: Device) -> None:
        memory = device.allocate(4096, MemoryKind.PINNED)
        array = memory.array

        def read() -> bool:
            array[:16] = 9
            return True

        batch = device.io.submit([IoJob(read, writes=(_range(memory, 0, 16),))])
        _wait(device, batch)
        stream = device.create_stream("after")
        _copy(stream, memory, 1024, memory, 0, 16)
        event = stream.record()
        _wait(device, event)
        assert (array[1024:1040] == 9).all()
        memory.free()

    def test_an_io_job_that_raises_is_heard(self, device: Device) -> None:
        batch = device.io.submit([IoJob(bool), IoJob(_break), IoJob(bool)])
        with pytest.raises(DeviceError) as raised:
            batch.synchronize()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert batch.is_done()
        with pytest.raises(DeviceError):
            _ = batch.ok
        assert device.io.submit([IoJob(bool)]).synchronize() is None

    # Failure

    def test_work_that_raises_poisons_its_stream(self, device: Device) -> None:
        stream = device.create_stream("poisoned")
        seen: list[int] = []
        stream.launch(lambda: seen.append(1), reads=(), writes=())
        good = stream.record()
        stream.launch(_sleep, reads=(), writes=())
        stream.launch(_break, reads=(), writes=())  # type: ignore[arg-type]
        stream.launch(lambda: seen.append(2), reads=(), writes=())
        bad = stream.record()
        with pytest.raises(DeviceError) as raised:
            stream.synchronize()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert seen == [1]
        good.synchronize()
        assert good.is_done()
        for call in (stream.record, bad.is_done, bad.synchronize, stream.synchronize):
            with pytest.raises(DeviceError):
                call()
        with pytest.raises(DeviceError):
            stream.launch(_sleep, reads=(), writes=())
        none = np.zeros(0, dtype=np.int64)
        with pytest.raises(DeviceError):
            stream.copy(none, none, none)

    def test_poison_spreads_along_events(self, device: Device) -> None:
        broken, other = device.create_stream("broken"), device.create_stream("other")
        seen: list[int] = []
        broken.launch(_sleep, reads=(), writes=())
        broken.launch(_break, reads=(), writes=())  # type: ignore[arg-type]
        event = broken.record()

        def wait_and_work() -> None:
            other.wait(event)
            other.launch(lambda: seen.append(1), reads=(), writes=())
            other.synchronize()

        with pytest.raises(DeviceError):
            wait_and_work()
        assert seen == []
        with pytest.raises(DeviceError):
            broken.synchronize()

    def test_a_refused_submission_enqueues_nothing(self, device: Device) -> None:
        stream = device.create_stream("refused")
        src, dst = _filled(device, 1), _filled(device, 2)
        expected = dst.array.copy()
        if not self.inject_submission_failure(device):
            _free(src, dst)
            pytest.skip("this device can not be made to refuse work")
        with pytest.raises(SubmissionError):
            _copy(stream, dst, 0, src, 0, 512)
        assert self.inject_submission_failure(device)
        with pytest.raises(SubmissionError):
            stream.launch(_break, reads=(), writes=())  # type: ignore[arg-type]
        assert stream.record().is_done()
        stream.synchronize()
        np.testing.assert_array_equal(dst.array, expected)
        _copy(stream, dst, 0, src, 0, 512)
        stream.synchronize()
        np.testing.assert_array_equal(dst.array[:512], src.array[:512])
        _free(src, dst)

    # Closing

    def test_close_finishes_everything(self, device: Device) -> None:
        seen: list[str] = []
        memory = device.allocate(4096, MemoryKind.DEVICE)
        stream = device.create_stream("close")
        stream.launch(_sleep, reads=(), writes=())
        stream.launch(lambda: seen.append("work"), reads=(), writes=())
        device.io.submit([IoJob(lambda: _note(seen, "job"))])
        device.close()
        device.close()
        assert sorted(seen) == ["job", "work"]
        for call in (
            lambda: memory.array,
            lambda: device.allocate(1, MemoryKind.DEVICE),
            lambda: device.create_stream("late"),
            lambda: device.io.submit([IoJob(bool)]),
            lambda: stream.launch(_sleep, reads=(), writes=()),
        ):
            with pytest.raises(ClosedError):
                call()
        memory.free()

    def test_close_tells_of_a_failure_nobody_heard(self, device: Device) -> None:
        stream = device.create_stream("unheard")
        stream.launch(_break, reads=(), writes=())  # type: ignore[arg-type]
        with pytest.raises(DeviceError):
            device.close()


def _filled(device: Device, seed: int) -> Memory:
    memory = device.allocate(_NUM_BYTES, MemoryKind.DEVICE)
    memory.array[:] = np.random.default_rng(seed).integers(0, 256, size=_NUM_BYTES)
    return memory


def _free(*memories: Memory) -> None:
    for memory in memories:
        memory.free()


def _range(memory: Memory, start: int, num_bytes: int) -> ByteRange:
    return ByteRange(MemAddress(memory.address + start), num_bytes)


def _copy(stream: Stream, dst: Memory, to: int, src: Memory, start: int, num_bytes: int) -> None:
    stream.copy(
        np.array([dst.address + to]), np.array([src.address + start]), np.array([num_bytes])
    )


def _launch_slow_fill(stream: Stream, memory: Memory, value: int) -> None:
    array = memory.array

    def fill() -> None:
        _sleep()
        array[:16] = value

    stream.launch(fill, reads=(), writes=[_range(memory, 0, 16)])


def _wait(device: Device, completion: Completion) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not completion.is_done():
        device.wait_for_progress(1.0)
        assert time.monotonic() < deadline, "the work never completes"


def _sleep() -> None:
    time.sleep(_SLOW_S)


def _sleep_well() -> bool:
    time.sleep(_SLOW_S)
    return True


def _note(seen: list[str], what: str) -> bool:
    seen.append(what)
    return True


def _break() -> bool:
    return bool(1 // 0)
