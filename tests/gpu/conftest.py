"""A CUDA device for each test, closed afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coldpage.device.base import Device


@pytest.fixture
def device() -> Iterator[Device]:
    """The first GPU."""
    from coldpage.device.cuda import CudaDevice

    device = CudaDevice()
    yield device
    device.close()
