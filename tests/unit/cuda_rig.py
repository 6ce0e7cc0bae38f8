"""A CUDA device on a driver that is not there, and what must be left of it at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from coldpage.device.cuda import CudaDevice
from coldpage.device.cuda.driver import Driver
from coldpage.types import Int64Array
from tests.unit.fake_cuda import FakeCuda

MIB = 1 << 20


@contextlib.contextmanager
def opened(library: FakeCuda) -> Iterator[CudaDevice]:
    """A device, closed at the end. Asserts that nothing of it is left."""
    device = CudaDevice(0, driver=Driver(library))
    yield device
    device.close()
    assert_nothing_is_left(library)


def assert_nothing_is_left(library: FakeCuda) -> None:
    assert library.context_depth == 0
    assert library.num_contexts == 0
    assert not library.mapped
    assert not library.registered
    assert not library.handles
    assert not library.modules
    assert library.calls["cuEventCreate"] == library.calls["cuEventDestroy_v2"]
    assert library.calls["cuStreamCreate"] == library.calls["cuStreamDestroy_v2"]


def array(*values: int) -> Int64Array:
    return np.array(values, np.int64)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
