"""The memory pool: where its slots lie, and that they stay there when it changes its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from coldpage.device.base import Device, DeviceBytes, MemoryKind
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice
from coldpage.errors import DeviceError
from coldpage.pools import MemoryPool
from coldpage.types import MemAddress

_SLOT = 4112  # not a whole number of pages


@pytest.fixture(params=[HostDevice, SimulatedDevice])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    make: Callable[[], Device] = request.param
    device = make()
    yield device
    device.close()
    assert getattr(device, "violations", []) == []


def test_a_resized_pool_keeps_its_slots(device: Device) -> None:
    pool = MemoryPool(device, 8, _SLOT, MemoryKind.DEVICE)
    base, max_slots = pool.base_address, pool.max_slots
    assert max_slots >= 16
    for slot in range(8):
        pool.array[slot] = slot + 1
    for num_slots, num_kept in [(16, 8), (3, 3), (max_slots if max_slots < 100 else 100, 3)]:
        pool.resize(num_slots)
        assert (pool.num_slots, pool.base_address, pool.max_slots) == (num_slots, base, max_slots)
        assert pool.array.shape == (num_slots, _SLOT)
        for slot in range(num_kept):
            assert (pool.array[slot] == slot + 1).all()
        pool.array[num_kept:] = 99
    slots = np.array([2, 0, num_slots - 1], np.int32)
    assert (pool.addresses(slots) - base).tolist() == [2 * _SLOT, 0, (num_slots - 1) * _SLOT]
    pool.close()


def test_a_view_is_the_same_bytes_of_every_slot(device: Device) -> None:
    pool = MemoryPool(device, 8, _SLOT, MemoryKind.DEVICE)
    pool.array[:] = np.arange(8)[:, None]
    view = pool.view(16, 100)
    assert isinstance(view, np.ndarray)
    assert (view.shape, view.strides) == ((8, 100), (_SLOT, 1))
    view[3] = 77
    assert (pool.array[3, 16:116] == 77).all() and (pool.array[3, 116:] == 3).all()
    del view
    pool.close()


def test_a_view_of_hidden_memory_says_where_it_is() -> None:
    device = SimulatedDevice(hides_memory=True)
    pool = MemoryPool(device, 8, _SLOT, MemoryKind.DEVICE)
    with pytest.raises(DeviceError, match="can not reach"):
        _ = pool.array
    view = pool.view(16, 100)
    assert view == DeviceBytes(MemAddress(pool.base_address + 16), 8, 100, _SLOT)
    assert view.__cuda_array_interface__ == {
        "shape": (8, 100),
        "strides": (_SLOT, 1),
        "typestr": "|u1",
        "data": (pool.base_address + 16, False),
        "version": 3,
    }
    assert isinstance(MemoryPool(device, 8, _SLOT, MemoryKind.PINNED).view(0, 4), np.ndarray)
    pool.close()


def test_slots_get_ready_one_by_one() -> None:
    device = SimulatedDevice(prepares_in_background=True)
    pool = MemoryPool(device, 4, 100, MemoryKind.PINNED)
    assert MemoryPool(device, 4, 100, MemoryKind.DEVICE).num_ready_slots == 4
    seen = []
    for _ in range(5):
        seen.append(pool.num_ready_slots)
        device.prepare(90)
    assert seen == [0, 0, 1, 2, 3]
    pool.resize(2)
    assert pool.num_ready_slots == 2
    pool.resize(8)
    assert (pool.num_ready_slots, device.prepare(10_000), pool.num_ready_slots) == (2, 600, 8)
    pool.close()


def test_a_pool_that_can_not_grow_stays_as_it_is(device: Device) -> None:
    pool = MemoryPool(device, 8, _SLOT, MemoryKind.DEVICE)
    pool.array[:] = 5
    with pytest.raises(DeviceError):
        pool.resize(pool.max_slots + 1)
    assert pool.num_slots == 8
    assert (pool.array == 5).all()
    pool.resize(pool.max_slots)
    pool.close()
