"""Memory on both sides of the link, and the plain copies that are the limit of what crosses it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from coldpage.bench.rows import timed_ms
from coldpage.device.base import Device, Memory, MemoryKind, Stream
from coldpage.errors import DeviceError
from coldpage.types import MemAddress

__all__ = ["Arena", "Direction", "default_bytes", "is_gpu", "prepared"]

Direction = str  # "down": hot -> host; "up": host -> hot; "both": at once

_PATIENCE_S = 120.0
# Beyond the pages, for pools that start at multiples of a page of the machine.
_SLACK_BYTES = 64 * 1024


def is_gpu(device: Device) -> bool:
    """Whether the hot level lies in memory of its own."""
    return device.name.startswith("cuda")


def default_bytes(device: Device) -> int:
    """How much a direction moves at a time: enough that starting it does not show."""
    return 1 << 30 if is_gpu(device) else 64 << 20


@contextlib.contextmanager
def prepared(device: Device) -> Iterator[None]:
    """Everything that is allocated in the block is ready at its end: what is page-locked gets so in
    the background, and that is not what is measured. Raises DeviceError when it failed or takes too
    long.
    """
    memories: list[Memory] = []
    allocate = device.allocate

    def noted(num_bytes: int, kind: MemoryKind, *, is_growable: bool = False) -> Memory:
        memories.append(allocate(num_bytes, kind, is_growable=is_growable))
        return memories[-1]

    device.allocate = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.allocate
    if not all(device.wait_until_ready(memory, _PATIENCE_S) for memory in memories):
        raise DeviceError(f"page-locked memory is not ready after {_PATIENCE_S:.0f} s")


class Arena:
    """Twice ``num_bytes`` of hot and of page-locked memory: a half for each direction. The memory
    and the streams end with the device.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device = device
        self.num_bytes = num_bytes
        with prepared(device):
            self.hot = device.allocate(2 * num_bytes + _SLACK_BYTES, MemoryKind.DEVICE)
            self.cold = device.allocate(2 * num_bytes + _SLACK_BYTES, MemoryKind.PINNED)
        self.offload_stream = device.create_stream("offload")
        self.onboard_stream = device.create_stream("onboard")
        self.cold.array[:] = 1  # memory that was never written is not there yet
        if self.hot.is_host_reachable:
            self.hot.array[:] = 1

    def synchronize(self) -> None:
        """Block until both streams are empty."""
        self.offload_stream.synchronize()
        self.onboard_stream.synchronize()

    def timed_ms(self, enqueue: Callable[[], object]) -> float:
        """How long it takes to enqueue the work and to finish it."""
        self.synchronize()

        def work() -> None:
            enqueue()
            self.synchronize()

        return timed_ms(work)

    def copy_plainly(self, direction: Direction, num_bytes: int) -> None:
        """Enqueue one contiguous copy each way that the direction has."""
        if direction != "up":
            _copy(self.offload_stream, self.cold.address, self.hot.address, num_bytes)
        if direction != "down":
            hot, cold = self.hot.address + self.num_bytes, self.cold.address + self.num_bytes
            _copy(self.onboard_stream, MemAddress(hot), MemAddress(cold), num_bytes)


def _copy(stream: Stream, dst: MemAddress, src: MemAddress, num_bytes: int) -> None:
    stream.copy(np.array([dst]), np.array([src]), np.array([num_bytes]))
