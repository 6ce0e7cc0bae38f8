"""Memory of a CUDA device: a range of addresses of which the first part has memory behind it, so it
can grow without moving.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Memory, MemoryKind
from coldpage.device.cuda.driver import AllocationProperties, Context, Driver, DriverError
from coldpage.errors import ClosedError, DeviceError
from coldpage.types import MemAddress

__all__ = ["DeviceMemory"]

# Growable memory is made of blocks, so that what is cut off can be given back. Fewer, larger ones
# for large memories: each costs the driver 0.1 ms.
_BLOCKS_PER_MEMORY: Final = 64
_MAX_BLOCK_BYTES: Final = 1024 * 1024 * 1024


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class DeviceMemory(Memory):
    """Memory of the device, which the host can not reach."""

    kind = MemoryKind.DEVICE

    def __init__(
        self, driver: Driver, context: Context, device: int, num_bytes: int, max_bytes: int
    ) -> None:
        self._driver = driver
        self._context = context
        self._properties = AllocationProperties.of_device(device)
        self._handles: list[int] = []
        self._is_freed = False
        with context:
            unit = driver.granularity_bytes(self._properties)
            self._block_bytes = _block_bytes(num_bytes, max_bytes, unit)
            self._reserved_bytes = _round_up(max_bytes, self._block_bytes)
            try:
                self.address = MemAddress(driver.reserve_addresses(self._reserved_bytes))
            except DriverError as error:
                raise _refused(num_bytes, error) from error
            try:
                self._map(num_bytes)
            except DeviceError:
                driver.call("cuMemAddressFree", self.address, self._reserved_bytes)
                raise
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes

    @property
    def is_host_reachable(self) -> bool:
        """Never."""
        return False

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Raises DeviceError: only the device reaches this memory."""
        self._check_open()
        raise DeviceError(
            "the host can not reach memory of the GPU: copy it on a stream, or view it with a "
            "library of the device"
        )

    def resize(self, num_bytes: int) -> None:
        """Grow or shrink in place. Whole blocks that are cut off are given back."""
        self._check_open()
        assert num_bytes > 0, "memory keeps at least one byte"
        if num_bytes > self.max_bytes:
            raise DeviceError(
                f"the memory can not grow to {num_bytes:,} bytes: only {self.max_bytes:,} bytes of "
                "addresses were set aside for it"
            )
        with self._context:
            self._map(num_bytes)
            try:
                self._unmap(_round_up(num_bytes, self._block_bytes) // self._block_bytes)
            except DriverError:
                self._map(self.num_bytes)  # nothing has changed, then
                raise
        self.num_bytes = num_bytes

    def _map(self, num_bytes: int) -> None:
        """Have memory for that many bytes. All or nothing."""
        old = len(self._handles)
        while len(self._handles) * self._block_bytes < num_bytes:
            address = self.address + len(self._handles) * self._block_bytes
            try:
                handle = self._driver.map_memory(address, self._block_bytes, self._properties)
            except DriverError as error:
                self._unmap(old)
                raise _refused(num_bytes, error) from error
            self._handles.append(handle)

    def _unmap(self, num_blocks: int) -> None:
        while len(self._handles) > num_blocks:
            address = self.address + (len(self._handles) - 1) * self._block_bytes
            self._driver.unmap_memory(address, self._block_bytes)
            self._driver.release_memory(self._handles.pop())

    def free(self) -> None:
        """Give memory and addresses back. Idempotent; what the driver refuses to take back can be
        tried once more.
        """
        if not self._reserved_bytes:
            return
        self._is_freed = True
        with self._context:
            self._unmap(0)
            self._driver.call("cuMemAddressFree", self.address, self._reserved_bytes)
        self._reserved_bytes = 0

    def _check_open(self) -> None:
        if self._is_freed:
            raise ClosedError("the memory was freed")


def _block_bytes(num_bytes: int, max_bytes: int, unit: int) -> int:
    if num_bytes == max_bytes:  # it will not grow: one block
        return _round_up(num_bytes, unit)
    block = unit
    while block * _BLOCKS_PER_MEMORY < num_bytes and block < _MAX_BLOCK_BYTES:
        block *= 2
    return block


def _refused(num_bytes: int, error: DriverError) -> DeviceError:
    return DeviceError(
        f"the GPU has no {num_bytes:,} bytes to give ({error.name}): make the device tiers smaller"
    )
