"""The shipped device kit on the devices of this package."""

from __future__ import annotations

import itertools

import pytest

from coldpage.device.base import Device
from coldpage.device.host import HostDevice
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


def test_the_kit_notices_a_device_that_forgets_events() -> None:
    class Forgetful(DeviceConformance):
        def make_device(self) -> Device:
            return _ForgetfulDevice()

    kit = Forgetful()
    device = kit.make_device()
    with pytest.raises(AssertionError):
        kit.test_a_stream_waits_for_anothers_event(device)
    device.close()
