"""A pool in memory: slot ``s`` lies at ``base_address + s * slot_bytes``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Device, DeviceBytes, MemoryKind
from coldpage.types import Int32Array, Int64Array, MemAddress

__all__ = ["MemoryPool"]


class MemoryPool:
    """``num_slots`` slots of ``slot_bytes`` in one allocation that the pool owns, and whose address
    never changes.
    """

    def __init__(self, device: Device, num_slots: int, slot_bytes: int, kind: MemoryKind) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._memory = device.allocate(num_slots * slot_bytes, kind, is_growable=True)

    @property
    def base_address(self) -> MemAddress:
        """Where slot 0 lies."""
        return self._memory.address

    @property
    def max_slots(self) -> int:
        """How many slots ``resize`` can give."""
        return self._memory.max_bytes // self.slot_bytes

    @property
    def num_ready_slots(self) -> int:
        """How many of the first slots can be used now; the device prepares the others."""
        return min(self.num_slots, self._memory.num_ready_bytes // self.slot_bytes)

    def resize(self, num_slots: int) -> None:
        """Have ``num_slots`` slots; those that stay keep their bytes.

        Nothing may be in flight on the slots that go. Raises DeviceError, changing nothing, when
        there is not enough memory or ``num_slots`` is over ``max_slots``.
        """
        assert num_slots > 0, "a pool has at least one slot"
        self._memory.resize(num_slots * self.slot_bytes)
        self.num_slots = num_slots

    def addresses(self, slots: Int32Array) -> Int64Array:
        """The address of each slot, int64 [len(slots)]."""
        return slots.astype(np.int64) * self.slot_bytes + self.base_address

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, [num_slots, slot_bytes]; raises DeviceError where the host can not
        reach them.
        """
        return self._memory.array.reshape(self.num_slots, self.slot_bytes)

    def view(self, offset_bytes: int, num_bytes: int) -> npt.NDArray[np.uint8] | DeviceBytes:
        """The same bytes of every slot, [num_slots, num_bytes], no copy: a writable array, or where
        the host can not reach them only what says where they are.
        """
        if self._memory.is_host_reachable:
            return self.array[:, offset_bytes : offset_bytes + num_bytes]
        start = MemAddress(self.base_address + offset_bytes)
        return DeviceBytes(start, self.num_slots, num_bytes, self.slot_bytes)

    def close(self) -> None:
        """Free the memory. The caller has synchronised everything that used it."""
        self._memory.free()
