"""Memory of any device, read and written by a test, also where the host can not reach it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Device, Memory, MemoryKind
from coldpage.types import MemAddress

__all__ = ["allocate_ready", "read_memory", "wait_until_ready", "write_memory"]

_Bytes = npt.NDArray[np.uint8]

_DEADLINE_S: Final = 60.0
_BOUNCE_BYTES: Final = 1 << 20


def allocate_ready(
    device: Device, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
) -> Memory:
    """New memory of which all bytes can be used. Blocks."""
    memory = device.allocate(num_bytes, kind, is_growable=is_growable)
    wait_until_ready(device, memory)
    return memory


def wait_until_ready(device: Device, memory: Memory) -> None:
    """Block until all bytes of the memory can be used, as after a ``resize``."""
    assert device.wait_until_ready(memory, _DEADLINE_S), (
        f"only {memory.num_ready_bytes} of {memory.num_bytes} bytes get ready"
    )


def read_memory(device: Device, memory: Memory) -> _Bytes:
    """A copy of the bytes, [num_bytes]. Blocks. Nothing that writes them may be in flight."""
    if memory.is_host_reachable:
        return memory.array.copy()
    return _bounce_of(device).read(memory.address, memory.num_bytes)


def write_memory(device: Device, memory: Memory, data: npt.ArrayLike, start: int = 0) -> None:
    """Write bytes [num_bytes] from ``start`` on; a single number fills the rest of the memory.
    Blocks. Nothing that uses them may be in flight.
    """
    written = np.asarray(data, np.uint8)
    num_bytes = written.size if written.ndim else memory.num_bytes - start
    assert start + num_bytes <= memory.num_bytes, "the bytes lie in the memory"
    if memory.is_host_reachable:
        memory.array[start : start + num_bytes] = written
    else:
        address = MemAddress(memory.address + start)
        _bounce_of(device).write(address, np.broadcast_to(written, num_bytes))


class _Bounce:
    """A stream, and pinned memory that is kept: making and freeing it may wait for all streams of
    the device, also for those that a test holds back.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.create_stream("memory access")
        self._memory = allocate_ready(device, _BOUNCE_BYTES, MemoryKind.PINNED)

    def read(self, address: MemAddress, num_bytes: int) -> _Bytes:
        found = np.empty(num_bytes, np.uint8)
        for start in range(0, num_bytes, _BOUNCE_BYTES):
            part = found[start : start + _BOUNCE_BYTES]
            self._copy(self._memory.address, MemAddress(address + start), part.size)
            part[:] = self._memory.array[: part.size]
        return found

    def write(self, address: MemAddress, data: _Bytes) -> None:
        for start in range(0, data.size, _BOUNCE_BYTES):
            part = data[start : start + _BOUNCE_BYTES]
            self._memory.array[: part.size] = part
            self._copy(MemAddress(address + start), self._memory.address, part.size)

    def _copy(self, dst: MemAddress, src: MemAddress, num_bytes: int) -> None:
        self._stream.copy(np.array([dst]), np.array([src]), np.array([num_bytes]))
        self._stream.synchronize()


def _bounce_of(device: Device) -> _Bounce:
    if not _last or _last[0].device is not device:
        _last[:] = [_Bounce(device)]
    return _last[0]


# Of the device that was asked last; its closing ends it.
_last: list[_Bounce] = []
