"""The device that a user names: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""

from __future__ import annotations

import logging
import re
from typing import Final

from coldpage.device.base import Device
from coldpage.device.host import HostDevice
from coldpage.errors import ConfigurationError, DeviceError

__all__ = ["AUTO_DEVICE", "cuda_index", "open_device"]

AUTO_DEVICE: Final = "auto"
_CUDA_NAME: Final = re.compile(r"cuda(?::(\d{1,4}))?")

_log = logging.getLogger(__name__)


def cuda_index(name: str) -> int | None:
    """The GPU that a device name means; None for ``auto`` and ``cpu``. Pure. Raises
    ConfigurationError for what is no device.
    """
    if name in (AUTO_DEVICE, "cpu"):
        return None
    match = _CUDA_NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(f"{name!r} is no device: write auto, cpu, cuda or cuda:N")
    return int(match[1] or 0)


def open_device(name: str) -> Device:
    """The device of that name; the caller closes it. ``auto`` is the first GPU, or the host where
    there is none. Raises ConfigurationError for what is no device, DeviceError for a GPU that can
    not be used.
    """
    index = cuda_index(name)
    if name == "cpu":
        return HostDevice()
    if index is not None:
        return _open_cuda(index)
    try:
        return _open_cuda(0)
    except DeviceError as error:
        _log.info("no GPU is used: %s", error)
        return HostDevice()


def _open_cuda(index: int) -> Device:
    # A machine without a GPU need not load any of it.
    from coldpage.device.cuda import CudaDevice

    return CudaDevice(index)
