"""The shipped device kit on the devices of this package."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from coldpage.device.base import Device, MemoryKind
from coldpage.device.copies import run_copies
from coldpage.device.host import HostDevice, HostMemory
from coldpage.device.simulated import SimulatedDevice, ViolationKind
from coldpage.testing.device_kit import DeviceConformance

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


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (_ForgetfulDevice, lambda kit, device: kit.test_a_stream_waits_for_anothers_event(device)),
        (_LazyDevice, lambda kit, device: kit.test_an_upload_consumes_its_array(device, 4095)),
        (_HastyDevice, lambda kit, device: kit.test_ranges_are_named_after_earlier_work(device)),
        (
            _ForgetfulMemoryDevice,
            lambda kit, device: kit.test_resized_memory_stays_where_it_is(
                device, MemoryKind.DEVICE, 10_000
            ),
        ),
    ],
)
def test_the_kit_notices_what_is_wrong(
    kind: type[HostDevice], test: Callable[[DeviceConformance, Device], None]
) -> None:
    device = kind()
    with pytest.raises(AssertionError):
        test(DeviceConformance(), device)
    device.close()
