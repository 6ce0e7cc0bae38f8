"""What every device promises, as tests: subclass ``DeviceConformance`` and run it with pytest."""

from __future__ import annotations

import time

import numpy as np
import pytest

from coldpage.device.base import Completion, Device, IoJob, Memory, MemoryKind, Stream
from coldpage.errors import ClosedError, DeviceError, SubmissionError, UsageError
from coldpage.testing.device_kit_memory import (
    SLOW_S,
    byte_range,
    copy_bytes,
    fail,
    filled_memory,
    free_all,
    sleep_a_little,
)
from coldpage.testing.device_kit_pages import DevicePageConformance
from coldpage.testing.memory_access import allocate_ready, read_memory

__all__ = ["DeviceConformance"]

_DEADLINE_S = 20.0


class DeviceConformance(DevicePageConformance):
    """Tests of one device. The subclass makes it."""

    # Order

    def test_work_on_a_stream_runs_in_order(self, device: Device) -> None:
        stream = device.create_stream("order")
        seen: list[int] = []
        for index in range(200):
            stream.launch(lambda index=index: seen.append(index), reads=(), writes=())  # type: ignore[misc]
        stream.synchronize()
        assert seen == list(range(200))

    def test_copies_and_work_on_a_stream_keep_their_order(self, device: Device) -> None:
        memory = allocate_ready(device, 4096, MemoryKind.PINNED)
        stream = device.create_stream("order")
        array = memory.array

        def fill(value: int) -> None:
            array[:16] = value

        for value in range(1, 21):
            stream.launch(
                lambda value=value: fill(value),  # type: ignore[misc]
                reads=(),
                writes=[byte_range(memory, 0, 16)],
            )
            copy_bytes(stream, memory, 16 * value, memory, 0, 16)
        stream.synchronize()
        assert array[16 : 16 * 21 : 16].tolist() == list(range(1, 21))
        memory.free()

    def test_a_stream_waits_for_anothers_event(self, device: Device) -> None:
        memory = allocate_ready(device, 4096, MemoryKind.PINNED)
        memory.array[:] = 0
        seen = device.allocate(4096, MemoryKind.DEVICE)
        producer, consumer = device.create_stream("producer"), device.create_stream("consumer")
        _launch_slow_fill(producer, memory, 7)
        consumer.wait(producer.record())
        copy_bytes(consumer, seen, 2048, memory, 0, 16)
        consumer.synchronize()
        assert (read_memory(device, seen)[2048:2064] == 7).all()
        free_all(memory, seen)

    def test_an_event_leaves_out_later_work(self, device: Device) -> None:
        stream = device.create_stream("later")
        before = stream.record()
        _wait(device, before)
        seen: list[int] = []
        stream.launch(lambda: seen.append(1), reads=(), writes=())
        event = stream.record()
        stream.launch(sleep_a_little, reads=(), writes=())
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
        stream.launch(sleep_a_little, reads=(), writes=())
        _wait(device, stream.record())
        _wait(device, device.io.submit([IoJob(_sleep_well)]))
        stream.synchronize()

    def test_kernels_are_launched_at_once_or_refused(self, device: Device) -> None:
        stream = device.create_stream("kernels")
        seen: list[int] = []
        if stream.runs_kernels:
            stream.launch_kernels(lambda: seen.append(1))
            assert seen == [1]
            with pytest.raises(SubmissionError, match="kernels"):
                stream.launch_kernels(_raise)
        else:
            with pytest.raises(SubmissionError, match="kernels"):
                stream.launch_kernels(lambda: seen.append(1))
            assert not seen
        stream.launch(lambda: seen.append(2), reads=(), writes=())
        stream.synchronize()
        assert seen[-1] == 2

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
        memory = allocate_ready(device, 4096, MemoryKind.PINNED)
        array = memory.array

        def read() -> bool:
            array[:16] = 9
            return True

        batch = device.io.submit([IoJob(read, writes=(byte_range(memory, 0, 16),))])
        _wait(device, batch)
        stream = device.create_stream("after")
        copy_bytes(stream, memory, 1024, memory, 0, 16)
        event = stream.record()
        _wait(device, event)
        assert (array[1024:1040] == 9).all()
        memory.free()

    def test_an_io_job_that_raises_is_heard(self, device: Device) -> None:
        batch = device.io.submit([IoJob(bool), IoJob(fail), IoJob(bool)])
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
        stream.launch(sleep_a_little, reads=(), writes=())
        stream.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
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
            stream.launch(sleep_a_little, reads=(), writes=())
        none = np.zeros(0, dtype=np.int64)
        with pytest.raises(DeviceError):
            stream.copy(none, none, none)

    def test_a_failure_names_the_caller(self, device: Device) -> None:
        stream = device.create_stream("named")
        stream.caller = "in encode of codec x"
        stream.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
        stream.caller = "in encode of codec y"
        stream.launch(sleep_a_little, reads=(), writes=())
        stream.caller = ""
        with pytest.raises(DeviceError, match=r"ZeroDivisionError.* in encode of codec x$"):
            stream.synchronize()

    def test_poison_spreads_along_events(self, device: Device) -> None:
        broken, other = device.create_stream("broken"), device.create_stream("other")
        seen: list[int] = []
        broken.launch(sleep_a_little, reads=(), writes=())
        broken.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
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
        src, dst = filled_memory(device, 1), filled_memory(device, 2)
        expected = read_memory(device, dst)
        if not self.inject_submission_failure(device):
            free_all(src, dst)
            pytest.skip("this device can not be made to refuse work")
        with pytest.raises(SubmissionError):
            copy_bytes(stream, dst, 0, src, 0, 512)
        assert self.inject_submission_failure(device)
        with pytest.raises(SubmissionError):
            stream.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
        stream.synchronize()
        np.testing.assert_array_equal(read_memory(device, dst), expected)
        copy_bytes(stream, dst, 0, src, 0, 512)
        stream.synchronize()
        found = read_memory(device, dst)
        np.testing.assert_array_equal(found[:512], read_memory(device, src)[:512])
        free_all(src, dst)

    # Closing

    def test_close_finishes_everything(self, device: Device) -> None:
        seen: list[str] = []
        memory = allocate_ready(device, 4096, MemoryKind.PINNED)
        stream = device.create_stream("close")
        stream.launch(sleep_a_little, reads=(), writes=())
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
            lambda: stream.launch(sleep_a_little, reads=(), writes=()),
        ):
            with pytest.raises(ClosedError):
                call()
        memory.free()

    def test_close_tells_of_a_failure_nobody_heard(self, device: Device) -> None:
        stream = device.create_stream("unheard")
        stream.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
        with pytest.raises(DeviceError):
            device.close()


def _launch_slow_fill(stream: Stream, memory: Memory, value: int) -> None:
    array = memory.array

    def fill() -> None:
        sleep_a_little()
        array[:16] = value

    stream.launch(fill, reads=(), writes=[byte_range(memory, 0, 16)])


def _raise() -> None:
    raise ValueError("no")


def _wait(device: Device, completion: Completion) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not completion.is_done():
        device.wait_for_progress(1.0)
        assert time.monotonic() < deadline, "the work never completes"


def _sleep_well() -> bool:
    time.sleep(SLOW_S)
    return True


def _note(seen: list[str], what: str) -> bool:
    seen.append(what)
    return True
