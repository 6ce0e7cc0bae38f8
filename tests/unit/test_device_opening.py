"""Devices by the names that users write."""

from __future__ import annotations

from typing import NoReturn

import pytest

from coldpage.device import cuda
from coldpage.device.host import HostDevice
from coldpage.device.opening import cuda_index, open_device
from coldpage.errors import ConfigurationError, DeviceError


def test_names_mean_a_gpu_or_none() -> None:
    assert [cuda_index(name) for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:12")] == [
        None,
        None,
        0,
        0,
        12,
    ]


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:1 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is no device: write auto, cpu, cuda or cuda:N"):
        open_device(name)


def test_without_a_gpu_auto_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fails(index: int) -> NoReturn:
        asked.append(index)
        raise DeviceError("there is no GPU")

    monkeypatch.setattr(cuda, "CudaDevice", fails)
    for name in ("auto", "cpu"):
        device = open_device(name)
        assert isinstance(device, HostDevice)
        device.close()
    assert asked == [0]
    with pytest.raises(DeviceError, match="there is no GPU"):
        open_device("cuda:1")
    assert asked == [0, 1]


def test_auto_is_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice()
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: device if index == 0 else None)
    assert open_device("auto") is device
    device.close()
