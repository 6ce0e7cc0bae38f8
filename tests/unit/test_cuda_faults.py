"""What a CUDA stream does when the driver, or torch, refuses something half-way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from coldpage.device.base import MemoryKind, PageParts
from coldpage.device.cuda import CudaDevice
from coldpage.device.cuda.copies import BATCH_BYTES, MIN_BATCH_COPIES
from coldpage.device.cuda.stream import CudaStream
from coldpage.errors import ClosedError, DeviceError, SubmissionError
from coldpage.types import PAGE_INDEX_PAIR, DeviceArray, MemAddress
from tests.unit.cuda_rig import array, opened
from tests.unit.fake_cuda import FakeCuda

NUM_PAGES = 8
PAGE_BYTES = 64 * 1024  # of which the kernel and the driver have each a share


@pytest.fixture
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(library: FakeCuda) -> Iterator[CudaDevice]:
    with opened(library) as device:
        yield device


@pytest.fixture
def upload_pages(device: CudaDevice) -> Callable[[CudaStream], None]:
    """Copies pages from the host to the device on a stream."""
    cold = device.allocate(NUM_PAGES * PAGE_BYTES, MemoryKind.PINNED)
    hot = device.allocate(NUM_PAGES * PAGE_BYTES, MemoryKind.DEVICE)
    pairs = np.zeros(NUM_PAGES, PAGE_INDEX_PAIR)
    pairs["dst"], pairs["src"] = np.arange(NUM_PAGES), np.arange(NUM_PAGES)[::-1]
    parts = PageParts(
        *(array(n) for n in (hot.address, PAGE_BYTES, cold.address, PAGE_BYTES)), array(PAGE_BYTES)
    )
    lent = DeviceArray(MemAddress(1 << 50), NUM_PAGES, pairs)
    return lambda stream: stream.copy_pages(parts, lent)


def _no_kernel(*arguments: object) -> None:
    """In place of one that torch and a GPU would run."""


# The side lane


def _assert_joined(library: FakeCuda, stream: CudaStream) -> None:
    """The stream waits for the last event of the lane, recorded after all that is there."""
    records = library.arguments["cuEventRecord"]
    event, _ = next(record for record in reversed(records) if record[1] != stream.handle)
    assert library.arguments["cuStreamWaitEvent"][-1] == (stream.handle, event, 0)


@pytest.mark.parametrize("is_kernel_refused", [False, True])
def test_a_refused_share_leaves_the_lane_joined(
    device: CudaDevice,
    library: FakeCuda,
    upload_pages: Callable[[CudaStream], None],
    monkeypatch: pytest.MonkeyPatch,
    is_kernel_refused: bool,
) -> None:
    def kernel(*arguments: object) -> None:
        if is_kernel_refused:
            raise RuntimeError("no")

    monkeypatch.setattr(CudaStream, "_run_kernel", kernel)
    stream = device.create_stream("copies")
    if not is_kernel_refused:
        library.fail("cuMemcpyBatchAsync")
    with pytest.raises(SubmissionError):
        upload_pages(stream)
    _assert_joined(library, stream)
    monkeypatch.setattr(CudaStream, "_run_kernel", _no_kernel)
    upload_pages(stream)
    _assert_joined(library, stream)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent"])
def test_a_lane_that_can_not_be_joined_is_waited_for(
    device: CudaDevice,
    library: FakeCuda,
    upload_pages: Callable[[CudaStream], None],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    monkeypatch.setattr(CudaStream, "_run_kernel", _no_kernel)
    stream = device.create_stream("copies")
    library.fail(call, after=1)
    with pytest.raises(SubmissionError, match=call):
        upload_pages(stream)
    assert library.arguments["cuStreamSynchronize"] == [(stream._lane,)]


# torch and Triton


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: object, **options: object) -> Any:
        raise error

    return fail


def _no_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch", None)


def _no_context(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.cuda.ExternalStream", _raise(RuntimeError("no context\nand a long tale")))


def _no_code(patch: pytest.MonkeyPatch) -> None:
    _stand_in_for_torch(patch)
    patch.setattr("coldpage.kernels.page_copy.copy_part", _raise(ValueError("does not compile")))


def _stand_in_for_torch(patch: pytest.MonkeyPatch) -> list[Any]:
    """What torch would be told, without a GPU: the streams, by how they were found."""
    import torch.cuda

    streams: list[Any] = []

    def enter(stream: Any) -> contextlib.nullcontext[None]:
        streams.append(stream)
        return contextlib.nullcontext()

    patch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("external", handle))
    patch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    patch.setattr(torch.cuda, "device", contextlib.nullcontext)
    patch.setattr(torch.cuda, "stream", enter)
    patch.setattr("coldpage.kernels.page_copy.copy_part", _no_kernel)
    return streams


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (_no_torch, "ModuleNotFoundError: .*torch.*"),
        (_no_context, "RuntimeError: no context"),
        (_no_code, "ValueError: does not compile"),
    ],
)
def test_errors_of_torch_and_triton_are_refused_submissions(
    device: CudaDevice,
    upload_pages: Callable[[CudaStream], None],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    why: str,
) -> None:
    stream = device.create_stream("copies")
    break_it(monkeypatch)
    with pytest.raises(SubmissionError, match=f"was rejected on stream 'copies': {why}$") as raised:
        upload_pages(stream)
    assert raised.value.__cause__ is not None
    monkeypatch.undo()
    _stand_in_for_torch(monkeypatch)
    upload_pages(stream)


# Kernels of others


def test_kernels_are_launched_on_torchs_current_stream(
    device: CudaDevice, library: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = _stand_in_for_torch(monkeypatch)
    stream, seen = device.create_stream("codec"), []
    assert stream.runs_kernels
    stream.launch_kernels(lambda: seen.append((list(streams), library.context_depth)))
    assert seen == [([("external", stream.handle)], 1)]
    stream.launch_kernels(lambda: None)
    assert streams == [("external", stream.handle)] * 2


def test_kernels_that_fail_are_refused_submissions(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in_for_torch(monkeypatch)
    stream = device.create_stream("codec")
    with pytest.raises(SubmissionError, match=r"kernels was rejected on stream 'codec': .*no$"):
        stream.launch_kernels(_raise(RuntimeError("no\nand a long tale")))
    stream.close()
    with pytest.raises(ClosedError):
        stream.launch_kernels(_no_kernel)


# The legacy default stream


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_default_stream_gets_single_copies(
    device: CudaDevice,
    library: FakeCuda,
    upload_pages: Callable[[CudaStream], None],
    monkeypatch: pytest.MonkeyPatch,
    handle: int,
) -> None:
    stream = device.wrap_stream(handle, "default")
    stream.copy(array(1000, 3000), array(5000, 9000), array(16, 32))
    assert library.arguments["cuMemcpyAsync"] == [
        (1000, 5000, 16, handle),
        (3000, 9000, 32, handle),
    ]
    stream.upload(MemAddress(1 << 50), np.ones(5000, np.uint8))
    assert library.calls["cuLaunchKernel"] == 2
    assert library.calls["cuMemcpyBatchAsync"] == 0
    streams = _stand_in_for_torch(monkeypatch)
    upload_pages(stream)
    assert streams == [("default", 0)]
    # The driver's share goes to the lane, which is no legacy stream.
    assert library.arguments["cuMemcpyBatchAsync"][0][-1] == stream._lane


def test_other_streams_of_somebody_else_get_batches(
    device: CudaDevice,
    library: FakeCuda,
    upload_pages: Callable[[CudaStream], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = device.wrap_stream(2, "of the thread")
    stream.copy(array(1000, 3000), array(5000, 9000), array(16, 32))
    stream.upload(MemAddress(1 << 50), np.ones(5000, np.uint8))
    assert library.calls["cuMemcpyBatchAsync"] == 2
    streams = _stand_in_for_torch(monkeypatch)
    upload_pages(stream)
    assert streams == [("external", 2)]


# What failed half-way


def test_a_copy_refused_half_way_leaves_the_stream_in_order(
    device: CudaDevice, library: FakeCuda
) -> None:
    """What was enqueued before stays, so an event after it still fences both sides."""
    stream = device.create_stream("copies")
    starts = np.arange(4 * MIN_BATCH_COPIES, dtype=np.int64) * 2 * BATCH_BYTES
    library.fail("cuMemcpyBatchAsync", after=2)
    with pytest.raises(SubmissionError):
        stream.copy(starts, starts + (1 << 50), np.full(starts.size, 1 << 20))
    assert library.calls["cuMemcpyBatchAsync"] == 3
    event = stream.record()
    assert library.arguments["cuEventRecord"] == [(event.handle, stream.handle)]


def test_an_event_that_can_not_be_recorded_gives_its_handle_back(
    device: CudaDevice, library: FakeCuda
) -> None:
    stream = device.create_stream("one")
    library.fail("cuEventRecord")
    with pytest.raises(DeviceError, match="cuEventRecord"):
        stream.record()
    stream.record()
    assert library.calls["cuEventCreate"] == 1


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_the_upload_kernel_is_loaded_once_more_where_it_failed(
    device: CudaDevice, library: FakeCuda, call: str
) -> None:
    host = device.allocate(4096, MemoryKind.PINNED)
    stream = device.create_stream("one")
    library.fail(call)
    with pytest.raises(SubmissionError, match=call):
        stream.upload(host.address, np.ones(16, np.uint8))
    assert library.calls["cuLaunchKernel"] == 0
    assert not library.modules
    stream.upload(host.address, np.ones(16, np.uint8))
    stream.upload(host.address, np.ones(16, np.uint8))
    assert library.calls["cuLaunchKernel"] == 2
    assert len(library.modules) == 1
