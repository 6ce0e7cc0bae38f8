"""Memory of any device, read and written by a test, also where the host can not reach it."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Device, Memory, MemoryKind, Stream
from coldpage.types import MemAddress

__all__ = ["allocate_ready", "read_memory", "wait_until_ready", "write_memory"]

_Bytes = npt.NDArray[np.uint8]

_DEADLINE_S: Final = 60.0
_POLL_S: Final = 0.0005

# The last device and its stream for copies here: streams are not given back before it closes.
_last: list[tuple[Device, Stream]] = []


def allocate_ready(
    device: Device, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
) -> Memory:
    """New memory of which all bytes can be used. Blocks."""
    memory = device.allocate(num_bytes, kind, is_growable=is_growable)
    wait_until_ready(device, memory)
    return memory


def wait_until_ready(device: Device, memory: Memory) -> None:
    """Block until all bytes of the memory can be used, as after a ``resize``."""
    deadline = time.monotonic() + _DEADLINE_S
    while memory.num_ready_bytes < memory.num_bytes:
        assert time.monotonic() < deadline, (
            f"only {memory.num_ready_bytes} of {memory.num_bytes} bytes get ready"
        )
        time.sleep(_POLL_S)
        device.poll()


def read_memory(device: Device, memory: Memory) -> _Bytes:
    """A copy of the bytes, [num_bytes]. Blocks. Nothing that writes them may be in flight."""
    if memory.is_host_reachable:
        return memory.array.copy()
    bounce = allocate_ready(device, memory.num_bytes, MemoryKind.PINNED)
    try:
        _copy(device, bounce.address, memory.address, memory.num_bytes)
        return bounce.array.copy()
    finally:
        bounce.free()


def write_memory(device: Device, memory: Memory, data: npt.ArrayLike, start: int = 0) -> None:
    """Write bytes [num_bytes] from ``start`` on; a single number fills the rest of the memory.
    Blocks. Nothing that uses them may be in flight.
    """
    written = np.asarray(data, np.uint8)
    num_bytes = written.size if written.ndim else memory.num_bytes - start
    assert start + num_bytes <= memory.num_bytes, "the bytes lie in the memory"
    if memory.is_host_reachable:
        memory.array[start : start + num_bytes] = written
    elif num_bytes:
        bounce = allocate_ready(device, num_bytes, MemoryKind.PINNED)
        try:
            bounce.array[:] = written
            _copy(device, MemAddress(memory.address + start), bounce.address, num_bytes)
        finally:
            bounce.free()


def _copy(device: Device, dst: MemAddress, src: MemAddress, num_bytes: int) -> None:
    if not _last or _last[0][0] is not device:
        _last[:] = [(device, device.create_stream("memory access"))]
    stream = _last[0][1]
    stream.copy(np.array([dst]), np.array([src]), np.array([num_bytes]))
    stream.synchronize()
