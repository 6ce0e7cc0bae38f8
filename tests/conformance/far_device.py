"""A device like a GPU, in host memory: the host can not reach what is DEVICE memory, and what is
PINNED gets ready piece by piece.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import MemoryKind, PageParts
from coldpage.device.host import HostDevice, HostMemory, HostStream
from coldpage.errors import DeviceError
from coldpage.types import DeviceArray, Int64Array, MemAddress

__all__ = ["FarDevice"]

_PIECE_BYTES: Final = 3 << 20


class _FarMemory(HostMemory):
    """DEVICE memory is out of reach."""

    @property
    def is_host_reachable(self) -> bool:
        return self.kind is MemoryKind.PINNED

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        array = super().array
        if not self.is_host_reachable:
            raise DeviceError("the host can not reach this memory")
        return array


class _PinnedMemory(_FarMemory):
    """A piece more is ready after each wait."""

    device: FarDevice

    def __init__(self, num_bytes: int, kind: MemoryKind, max_bytes: int) -> None:
        super().__init__(num_bytes, kind, max_bytes)
        self.prepared_bytes = _PIECE_BYTES

    @property
    def num_ready_bytes(self) -> int:
        return min(self.prepared_bytes, self.num_bytes)

    def resize(self, num_bytes: int) -> None:
        super().resize(num_bytes)
        pieces = -(-num_bytes // _PIECE_BYTES)
        self.prepared_bytes = min(self.prepared_bytes, max(1, pieces) * _PIECE_BYTES)

    def free(self) -> None:
        if self in self.device.pinned:
            self.device.pinned.remove(self)
        super().free()


class _FarStream(HostStream):
    """Refuses memory that is not ready."""

    memories: list[_PinnedMemory]

    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        for side in (dst, src):
            self._check_ready(side, num_bytes)
        super().copy(dst, src, num_bytes)

    def copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        if pairs.host is not None:
            for base, stride, slots in (
                (parts.dst_base, parts.dst_stride_bytes, pairs.host["dst"]),
                (parts.src_base, parts.src_stride_bytes, pairs.host["src"]),
            ):
                starts = base[:, None] + stride[:, None] * slots
                self._check_ready(starts, parts.num_bytes[:, None])
        super().copy_pages(parts, pairs)

    def upload(self, dst: MemAddress, data: npt.NDArray[np.uint8]) -> None:
        self._check_ready(np.array([dst]), np.array([data.size]))
        super().upload(dst, data)

    def _check_ready(self, starts: Int64Array, num_bytes: Int64Array) -> None:
        for memory in self.memories:
            first, stop = (memory.address + n for n in (memory.num_ready_bytes, memory.num_bytes))
            uses = (num_bytes > 0) & (starts < stop) & (starts + num_bytes > first)
            assert not uses.any(), "memory that is not ready is used"


class FarDevice(HostDevice):
    """Everything else is as on the host device."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[_PinnedMemory] = []

    def allocate(
        self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False
    ) -> HostMemory:
        far = _PinnedMemory if kind is MemoryKind.PINNED else _FarMemory
        self._check_open()
        memory = far(num_bytes, kind, max(num_bytes, 1 << 30) if is_growable else num_bytes)
        self._memories.append(memory)
        if isinstance(memory, _PinnedMemory):
            self.pinned.append(memory)
            memory.device = self
        return memory

    def create_stream(self, name: str) -> HostStream:
        self._check_open()
        stream = _FarStream(name, self._progress)
        stream.memories = self.pinned
        self._streams.append(stream)
        return stream

    def wait_for_progress(self, timeout_s: float) -> None:
        super().wait_for_progress(timeout_s)
        for memory in self.pinned:
            if memory.prepared_bytes < memory.num_bytes:
                memory.prepared_bytes += _PIECE_BYTES
