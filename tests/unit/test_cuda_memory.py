"""Memory of the CUDA device around the driver's calls: blocks that grow, pieces that are locked."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from coldpage.device.base import MemoryKind
from coldpage.device.cuda import CudaDevice, memory
from coldpage.device.cuda.driver import Driver
from coldpage.device.cuda.memory import PinnedMemory
from coldpage.errors import ClosedError, DeviceError
from tests.unit.cuda_rig import MIB, array, opened, wait_for
from tests.unit.fake_cuda import FakeCuda


@pytest.fixture
def library() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(library: FakeCuda) -> Iterator[CudaDevice]:
    with opened(library) as device:
        yield device


# Device memory


def test_memory_grows_in_blocks_and_gives_them_back(device: CudaDevice, library: FakeCuda) -> None:
    grown = device.allocate(256 * MIB, MemoryKind.DEVICE, is_growable=True)
    address, num_blocks = grown.address, len(library.mapped)
    grown.resize(512 * MIB)
    assert len(library.mapped) == 2 * num_blocks
    grown.resize(MIB)
    assert len(library.mapped) == 1
    assert grown.address == address
    with pytest.raises(DeviceError, match="bytes of addresses were set aside"):
        grown.resize(grown.max_bytes + 1)
    assert grown.num_bytes == MIB


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_growth_that_fails_half_way_changes_nothing(
    device: CudaDevice, library: FakeCuda, call: str
) -> None:
    grown = device.allocate(64 * MIB, MemoryKind.DEVICE, is_growable=True)
    before = dict(library.mapped)
    library.fail(call, after=5)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        grown.resize(256 * MIB)
    assert library.mapped == before
    assert grown.num_bytes == 64 * MIB
    grown.resize(256 * MIB)


def test_an_allocation_that_fails_leaves_no_addresses(
    device: CudaDevice, library: FakeCuda
) -> None:
    library.fail("cuMemCreate")
    with pytest.raises(DeviceError, match="make the device tiers smaller"):
        device.allocate(MIB, MemoryKind.DEVICE)
    assert library.calls["cuMemAddressFree"] == library.calls["cuMemAddressReserve"] == 1


# Host memory


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIECE_BYTES", MIB)


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_is_locked_in_pieces(device: CudaDevice, library: FakeCuda) -> None:
    pinned = device.allocate(5 * MIB + 10, MemoryKind.PINNED)
    assert pinned.num_ready_bytes >= MIB
    wait_for(lambda: pinned.num_ready_bytes == pinned.num_bytes)
    starts = sorted(library.registered)
    assert starts == [pinned.address + i * MIB for i in range(6)]
    assert library.registered[starts[-1]] == 4096
    assert device.runtime.registrar.boundaries.tolist() == starts[1:]
    assert device.runtime.registrar.is_pinned(pinned.address)
    stream = device.create_stream("copies")
    stream.copy(array(1 << 50), array(pinned.address + MIB - 100), array(300))
    assert library.arguments["cuMemcpyBatchAsync"][0][3] == 2


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_that_shrinks_and_grows(device: CudaDevice, library: FakeCuda) -> None:
    pinned = device.allocate(4 * MIB, MemoryKind.PINNED, is_growable=True)
    wait_for(lambda: pinned.num_ready_bytes == pinned.num_bytes)
    pinned.array[:] = 7
    pinned.resize(MIB + 5)
    assert len(library.registered) == 2
    assert pinned.num_ready_bytes == pinned.num_bytes == MIB + 5
    assert (pinned.array == 7).all()
    pinned.resize(3 * MIB)
    wait_for(lambda: pinned.num_ready_bytes == 3 * MIB)
    assert (pinned.array[: MIB + 5] == 7).all()
    pinned.free()
    assert not library.registered
    with pytest.raises(ClosedError):
        pinned.resize(MIB)


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_can_not_be_locked_leaves_the_others(
    device: CudaDevice, library: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    library.fail("cuMemHostRegister_v2", after=2)
    with caplog.at_level(logging.ERROR):
        pinned = device.allocate(5 * MIB, MemoryKind.PINNED)
        wait_for(lambda: bool(caplog.records))
    assert pinned.num_ready_bytes == 2 * MIB
    assert "only 2,097,152 of 5,242,880 bytes" in caplog.text
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    # What comes later is locked all the same.
    other = device.allocate(2 * MIB, MemoryKind.PINNED)
    wait_for(lambda: other.num_ready_bytes == other.num_bytes)


def test_host_memory_of_which_nothing_can_be_locked(device: CudaDevice, library: FakeCuda) -> None:
    library.fail("cuMemHostRegister_v2")
    with pytest.raises(DeviceError, match="raise the limit of locked memory"):
        device.allocate(MIB, MemoryKind.PINNED)
    with pytest.raises(DeviceError, match="bytes of RAM"):
        device.allocate(1 << 50, MemoryKind.PINNED)


@pytest.mark.usefixtures("small_pieces")
def test_closing_does_not_wait_for_the_last_piece() -> None:
    library = FakeCuda()
    device = CudaDevice(0, driver=Driver(library))
    library._do_cuMemHostRegister_v2 = lambda *args: time.sleep(0.02)  # type: ignore[method-assign]
    library._do_cuMemHostUnregister = lambda *args: None  # type: ignore[method-assign]
    pinned = device.allocate(1024 * MIB, MemoryKind.PINNED)
    assert isinstance(pinned, PinnedMemory)
    start_s = time.monotonic()
    device.close()
    assert time.monotonic() - start_s < 5
    assert library.calls["cuMemHostRegister_v2"] < 500
