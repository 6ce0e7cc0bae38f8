"""Batched memory copies on the host: merge what is contiguous, then one memmove each."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from coldpage.types import Int64Array, MemAddress

__all__ = ["CopyList", "has_overlap", "merge_copies", "run_copies", "write_bytes"]

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
