"""Batched memory copies on the host: merge what is contiguous, then one memmove each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.base import PageParts, Stream
from coldpage.types import PAGE_INDEX_PAIR, ByteRange, DeviceArray, Int64Array, MemAddress

__all__ = [
    "CopyList",
    "has_overlap",
    "launch_page_copy",
    "merge_copies",
    "page_copies",
    "run_copies",
    "write_bytes",
]

# Destination, source and size per copy, each [num_copies].
CopyList = tuple[Int64Array, Int64Array, Int64Array]

# Below this a memmove takes about as long as giving up the interpreter lock and getting it back.
# Worse, a busy Python thread keeps the lock for 5 ms each time, so small copies hold on to it.
_RELEASE_LOCK_BYTES: Final = 32 * 1024

_MEMMOVE_ADDRESS: Final = ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value
assert _MEMMOVE_ADDRESS is not None
_SIGNATURE: Final = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_releasing = ctypes.CFUNCTYPE(*_SIGNATURE)(_MEMMOVE_ADDRESS)
_memmove_holding = ctypes.PYFUNCTYPE(*_SIGNATURE)(_MEMMOVE_ADDRESS)


def merge_copies(dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> CopyList:
    """Join consecutive copies that are contiguous on both sides, and leave out empty ones. Pure."""
    if not num_bytes.all():
        keep = num_bytes > 0
        dst, src, num_bytes = dst[keep], src[keep], num_bytes[keep]
    if len(dst) < 2:
        return dst, src, num_bytes
    is_joined = (dst[:-1] + num_bytes[:-1] == dst[1:]) & (src[:-1] + num_bytes[:-1] == src[1:])
    if not is_joined.any():
        return dst, src, num_bytes
    starts = np.concatenate(([0], np.flatnonzero(~is_joined) + 1))
    return dst[starts], src[starts], np.add.reduceat(num_bytes, starts)


def run_copies(copies: CopyList) -> None:
    """Do the copies now, on this thread. Large ones let other threads run Python meanwhile."""
    dst, src, num_bytes = merge_copies(*copies)
    if len(dst) == 0:
        return
    is_large = int(num_bytes.max()) >= _RELEASE_LOCK_BYTES
    memmove = _memmove_releasing if is_large else _memmove_holding
    for to, source, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
        memmove(to, source, size)


def write_bytes(address: MemAddress, data: bytes) -> None:
    """Copy ``data`` to ``address`` now, on this thread."""
    memmove = _memmove_releasing if len(data) >= _RELEASE_LOCK_BYTES else _memmove_holding
    memmove(address, data, len(data))


def page_copies(parts: PageParts, pairs: npt.NDArray[np.void]) -> CopyList:
    """The single copies of the pages of PAGE_INDEX_PAIRs [num_pages], part by part. Pure."""
    num_parts, num_pages = parts.num_bytes.size, pairs.size
    dst = parts.dst_base[:, None] + parts.dst_stride_bytes[:, None] * pairs["dst"]
    src = parts.src_base[:, None] + parts.src_stride_bytes[:, None] * pairs["src"]
    sizes = np.broadcast_to(parts.num_bytes[:, None], (num_parts, num_pages))
    return dst.reshape(-1), src.reshape(-1), sizes.reshape(-1)


def launch_page_copy(
    stream: Stream,
    parts: PageParts,
    pairs: DeviceArray,
    check: Callable[[CopyList], None] | None = None,
) -> None:
    """``Stream.copy_pages`` for a device whose memory the host reaches: one launched function.
    ``check`` sees the single copies just before they run.
    """
    if not pairs.size:
        return
    num_bytes = pairs.size * PAGE_INDEX_PAIR.itemsize

    def copies() -> CopyList:
        raw = ctypes.string_at(pairs.address, num_bytes)
        return page_copies(parts, np.frombuffer(raw, PAGE_INDEX_PAIR))

    def ranges(side: int) -> Sequence[ByteRange]:
        columns = copies()
        starts, sizes = columns[side].tolist(), columns[2].tolist()
        return [ByteRange(MemAddress(a), n) for a, n in zip(starts, sizes, strict=True)]

    def reads() -> Sequence[ByteRange]:
        return [ByteRange(pairs.address, num_bytes), *ranges(1)]

    def work() -> None:
        found = copies()
        if check is not None:
            check(found)
        run_copies(found)

    if pairs.size:
        stream.launch(work, reads=reads, writes=lambda: ranges(0))


def has_overlap(copies: CopyList) -> bool:
    """Whether some destination overlaps another destination or any source. Pure."""
    dst, src, num_bytes = copies
    if len(dst) == 0:
        return False
    order = np.argsort(dst)
    starts, stops = dst[order], (dst + num_bytes)[order]
    if (stops[:-1] > starts[1:]).any():
        return True
    # The last destination that starts before a source ends is the only one that can reach into it.
    last = np.searchsorted(starts, src + num_bytes) - 1
    return bool(((last >= 0) & (stops[last] > src)).any())
