"""The end of a CUDA device, and what still works after it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from coldpage.device.base import IoJob, Memory, MemoryKind
from coldpage.device.cuda import CudaDevice
from coldpage.device.cuda.driver import Driver
from coldpage.device.cuda.stream import CudaStream
from coldpage.errors import ClosedError, DeviceError
from tests.unit.cuda_rig import assert_nothing_is_left
from tests.unit.fake_cuda import FakeCuda

CLOSING_CALLS = [
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuMemHostUnregister",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuModuleUnload",
    "cuDevicePrimaryCtxRelease_v2",
]


class Busy:
    """A device with two of everything."""

    def __init__(self) -> None:
        self.library = FakeCuda()
        self.device = CudaDevice(0, driver=Driver(self.library))
        self.memories: list[Memory] = [
            self.device.allocate(8192, kind) for kind in MemoryKind for _ in range(2)
        ]
        self.streams: list[CudaStream] = []
        for name in ("one", "two"):
            stream = self.device.create_stream(name)
            # To the host, so that the kernel is loaded.
            stream.upload(self.memories[-1].address, np.ones(16, np.uint8))
            self.streams.append(stream)
        self.events = [stream.record() for stream in self.streams]
        self.device.io.submit([IoJob(lambda: True)]).synchronize()


@pytest.mark.parametrize("call", CLOSING_CALLS)
def test_a_part_that_can_not_be_closed_leaves_no_other_open(call: str) -> None:
    busy = Busy()
    library = busy.library
    library.fail(call)
    with pytest.raises(DeviceError, match=call):
        busy.device.close()
    busy.device.close()
    assert library.context_depth == 0
    assert library.calls["cuDevicePrimaryCtxRelease_v2"] == 1
    assert library.calls["cuStreamDestroy_v2"] == library.calls["cuStreamCreate"] == 2
    assert library.calls["cuEventDestroy_v2"] == library.calls["cuEventCreate"] == 2
    assert library.calls["cuModuleUnload"] == 1
    # What was refused is all that is left.
    assert len(library.mapped) == (call == "cuMemUnmap")
    assert len(library.registered) == (call == "cuMemHostUnregister")
    assert len(library.handles) == (call in ("cuMemUnmap", "cuMemRelease"))
    assert not [thread for thread in threading.enumerate() if "coldpage-io" in thread.name]


def test_a_device_that_fails_altogether_is_closed_and_tells_the_first_failure() -> None:
    """As after an illegal access: the driver refuses everything from then on."""
    busy = Busy()
    for call in CLOSING_CALLS:
        busy.library.fail(call, times=100)
    with pytest.raises(DeviceError, match="cuStreamSynchronize") as raised:
        busy.device.close()
    notes = " ".join(raised.value.__notes__)
    # Memory that is mapped has no end but that one.
    assert all(call in notes for call in CLOSING_CALLS[1:5] + CLOSING_CALLS[7:])
    assert not [thread for thread in threading.enumerate() if "coldpage-io" in thread.name]
    busy.device.close()


def test_a_context_that_can_not_be_entered_does_not_keep_the_threads() -> None:
    busy = Busy()
    busy.library.fail("cuCtxPushCurrent_v2", times=100)
    with pytest.raises(DeviceError, match="cuCtxPushCurrent"):
        busy.device.close()
    assert not [thread for thread in threading.enumerate() if "coldpage-io" in thread.name]
    assert busy.library.calls["cuDevicePrimaryCtxRelease_v2"] == 1


def test_what_comes_after_the_end_reaches_no_driver() -> None:
    busy = Busy()
    stream, event = busy.streams[0], busy.events[0]
    busy.device.close()
    assert_nothing_is_left(busy.library)
    before = busy.library.calls.copy()
    stream.synchronize()
    stream.close()
    event.synchronize()
    assert event.is_done()
    busy.device.wait_for_progress(0.0)
    for memory in busy.memories:
        memory.free()
    busy.device.close()
    for call in (
        stream.record,
        lambda: stream.wait(event),
        lambda: stream.upload(busy.memories[0].address, np.ones(16, np.uint8)),
        lambda: busy.memories[0].resize(4096),
        lambda: busy.device.create_stream("late"),
    ):
        with pytest.raises(ClosedError):
            call()
    assert busy.library.calls == before


def test_an_event_of_a_stream_that_could_not_be_finished_is_not_done() -> None:
    busy = Busy()
    busy.library.fail("cuStreamSynchronize")
    with pytest.raises(DeviceError):
        busy.device.close()
    lost, finished = busy.events
    for ask in (lost.is_done, lost.synchronize):
        with pytest.raises(DeviceError, match="'one' ended before"):
            ask()
    assert finished.is_done()


def test_memory_that_outlived_its_device_reaches_no_driver() -> None:
    busy = Busy()
    for call in ("cuMemUnmap", "cuMemHostUnregister"):
        busy.library.fail(call, times=2)
    with pytest.raises(DeviceError):
        busy.device.close()
    before = busy.library.calls.copy()
    for memory in busy.memories:
        with pytest.raises(ClosedError):
            memory.free()
    assert busy.library.calls == before
