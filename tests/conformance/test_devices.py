"""The shipped device kit on the devices of this package."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from coldpage.device.base import Device, MemoryKind, PageParts
from coldpage.device.copies import page_copies, run_copies
from coldpage.device.host import HostDevice, HostMemory
from coldpage.device.simulated import SimulatedDevice, ViolationKind
from coldpage.testing import device_kit_memory, memory_access
from coldpage.testing.device_kit import DeviceConformance
from coldpage.types import PAGE_INDEX_PAIR, DeviceArray
from tests.conformance.far_device import FarDevice

_seeds = itertools.count()


class TestHostDevice(DeviceConformance):
    def make_device(self) -> Device:
        return HostDevice()


class TestSimulatedDevice(DeviceConformance):
    def make_device(self) -> Device:
        return SimulatedDevice(next(_seeds))

    def inject_submission_failure(self, device: Device) -> bool:
        assert isinstance(device, SimulatedDevice)
        device.fail_next_submission()
        return True

    def check_closed_device(self, device: Device) -> None:
        assert isinstance(device, SimulatedDevice)
        # Leaks are what the tests of close are about; those of the device itself check them.
        assert [v for v in device.violations if v.kind is not ViolationKind.LEAK] == []


class TestFarDevice(DeviceConformance):
    """The kit reaches what the host can not, and waits for what is not ready."""

    def make_device(self) -> Device:
        return FarDevice()


@pytest.mark.gpu
class TestCudaDevice(DeviceConformance):
    # Three pieces, and a little.
    large_bytes = (3 << 29) + 4099

    def make_device(self) -> Device:
        from coldpage.device.cuda import CudaDevice

        return CudaDevice()


class _ForgetfulDevice(HostDevice):
    """Ignores the order of events."""

    def create_stream(self, name):  # type: ignore[no-untyped-def]
        stream = super().create_stream(name)
        stream.wait = lambda event: None  # type: ignore[method-assign]
        return stream


class _LazyDevice(HostDevice):
    """Reads what is uploaded when it gets to it."""

    def create_stream(self, name):  # type: ignore[no-untyped-def]
        stream = super().create_stream(name)

        def upload(dst, data):  # type: ignore[no-untyped-def]
            if len(data):
                source, size = np.array([data.ctypes.data]), np.array([len(data)])
                copies = np.array([dst]), source, size
                stream.launch(lambda: run_copies(copies), reads=(), writes=())

        stream.upload = upload  # type: ignore[method-assign]
        return stream


class _HastyDevice(HostDevice):
    """Asks for the ranges at submission."""

    def create_stream(self, name):  # type: ignore[no-untyped-def]
        stream = super().create_stream(name)
        launch = stream.launch

        def launch_hastily(work, *, reads, writes):  # type: ignore[no-untyped-def]
            launch(work, reads=reads() if callable(reads) else reads, writes=writes)

        stream.launch = launch_hastily  # type: ignore[method-assign]
        return stream


class _PageDevice(HostDevice):
    """Copies pages by a function that is wrong."""

    def create_stream(self, name):  # type: ignore[no-untyped-def]
        stream = super().create_stream(name)

        def copy(parts, pairs):  # type: ignore[no-untyped-def]
            if pairs.size:
                self.copy_pages(stream, parts, pairs)

        stream.copy_pages = copy  # type: ignore[method-assign]
        return stream

    def copy_pages(self, stream, parts, pairs):  # type: ignore[no-untyped-def]
        def run() -> None:
            copies = page_copies(self.changed(parts), self.load(pairs))
            run_copies(tuple(column.copy() for column in copies))  # type: ignore[arg-type]

        stream.launch(run, reads=(), writes=())

    def changed(self, parts: PageParts) -> PageParts:
        return parts

    def load(self, pairs: DeviceArray) -> np.ndarray:  # type: ignore[type-arg]
        words = ctypes.c_uint8 * (PAGE_INDEX_PAIR.itemsize * pairs.size)
        return np.frombuffer(words.from_address(pairs.address), PAGE_INDEX_PAIR).copy()


class _ReadsPairsEarly(_PageDevice):
    """Takes them before their upload has run."""

    def copy_pages(self, stream, parts, pairs):  # type: ignore[no-untyped-def]
        copies = page_copies(parts, self.load(pairs))
        stream.launch(lambda: run_copies(copies), reads=(), writes=())


class _ReadsHostPairsLate(_PageDevice):
    """Takes them when they may be gone."""

    def load(self, pairs: DeviceArray) -> np.ndarray:  # type: ignore[type-arg]
        found = super().load(pairs)
        return found if pairs.host is None else pairs.host  # type: ignore[return-value]


class _PacksPages(_PageDevice):
    """Takes slots for as large as what is copied of them."""

    def changed(self, parts: PageParts) -> PageParts:
        return dataclasses.replace(parts, dst_stride_bytes=parts.num_bytes)


class _CopiesWords(_PageDevice):
    """Forgets the odd bytes at the end."""

    def changed(self, parts: PageParts) -> PageParts:
        return dataclasses.replace(parts, num_bytes=parts.num_bytes // 4 * 4)


class _OvertakesCopies(_PageDevice):
    """Copies pages on another stream."""

    def copy_pages(self, stream, parts, pairs):  # type: ignore[no-untyped-def]
        other = super().create_stream("other")
        super().copy_pages(other, parts, pairs)


class _NeverReadyMemory(HostMemory):
    @property
    def num_ready_bytes(self) -> int:
        return self.num_bytes - 1


class _NeverReadyDevice(HostDevice):
    def allocate(self, num_bytes, kind, *, is_growable=False):  # type: ignore[no-untyped-def]
        return _NeverReadyMemory(num_bytes, kind, 4 * num_bytes)


class _LyingMemory(HostMemory):
    """Claims that the host does not reach it."""

    is_host_reachable = False


class _LyingDevice(HostDevice):
    def allocate(self, num_bytes, kind, *, is_growable=False):  # type: ignore[no-untyped-def]
        return _LyingMemory(num_bytes, kind, 4 * num_bytes)


class _ForgetfulMemory(HostMemory):
    """Loses its contents when it is resized."""

    def resize(self, num_bytes: int) -> None:
        super().resize(1)
        super().resize(num_bytes)


class _ForgetfulMemoryDevice(HostDevice):
    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> HostMemory:
        return _ForgetfulMemory(num_bytes, kind, 4 * num_bytes if is_growable else num_bytes)


_DEVICE, _PINNED = MemoryKind.DEVICE, MemoryKind.PINNED


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (_ForgetfulDevice, lambda kit, device: kit.test_a_stream_waits_for_anothers_event(device)),
        (
            _ForgetfulDevice,
            lambda kit, device: kit.test_a_copy_of_pages_waits_for_an_event(device),
        ),
        (
            _LazyDevice,
            lambda kit, device: kit.test_an_upload_consumes_its_array(device, 4095, _DEVICE),
        ),
        (_HastyDevice, lambda kit, device: kit.test_ranges_are_named_after_earlier_work(device)),
        (
            _ForgetfulMemoryDevice,
            lambda kit, device: kit.test_resized_memory_stays_where_it_is(
                device, MemoryKind.DEVICE, 10_000
            ),
        ),
        (
            _ReadsPairsEarly,
            lambda kit, device: kit.test_any_number_of_pages(device, 31, False, _DEVICE, _PINNED),
        ),
        (
            _ReadsHostPairsLate,
            lambda kit, device: kit.test_any_number_of_pages(device, 31, True, _DEVICE, _PINNED),
        ),
        (
            _PacksPages,
            lambda kit, device: kit.test_pages_of_any_alignment(device, 2, 1, _DEVICE, _PINNED),
        ),
        (
            _CopiesWords,
            lambda kit, device: kit.test_pages_of_any_size(device, 4099, _DEVICE, _PINNED),
        ),
        (
            _OvertakesCopies,
            lambda kit, device: kit.test_copies_of_pages_keep_their_order(device, True),
        ),
        (
            _NeverReadyDevice,
            lambda kit, device: kit.test_large_memory_gets_ready(device, _PINNED),
        ),
        (
            _LyingDevice,
            lambda kit, device: kit.test_memory_says_whether_the_host_reaches_it(
                device, _PINNED, False
            ),
        ),
    ],
)
def test_the_kit_notices_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[HostDevice],
    test: Callable[[DeviceConformance, Device], None],
) -> None:
    monkeypatch.setattr(device_kit_memory, "_READY_S", 0.02)
    monkeypatch.setattr(memory_access, "_DEADLINE_S", 0.02)
    device = kind()
    with pytest.raises(AssertionError):
        test(DeviceConformance(), device)
    device.close()
