"""Copies by the driver: cut where registrations end, and submitted in batches."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from coldpage.device.copies import CopyList
from coldpage.device.cuda.driver import Driver, SrcAccessOrder
from coldpage.types import Int64Array

__all__ = [
    "BATCH_BYTES",
    "MIN_BATCH_COPIES",
    "split_at",
    "split_batches",
    "submit_copies",
]

# The link works on the first batches while the next are submitted; a single batch also pauses
# longer between its copies than several do.
BATCH_BYTES: Final = 16 * 1024 * 1024
# Fewer copies are not worth a batch, whose own submission costs 10 us.
MIN_BATCH_COPIES: Final = 64


def split_at(copies: CopyList, boundaries: Int64Array) -> CopyList:
    """Cut copies in two where source or destination reaches across one of the sorted addresses.
    Pure.
    """
    if not copies[2].size:
        return copies
    for side in (0, 1):
        while True:
            start, sizes = copies[side], copies[2]
            stop = start + sizes
            # One of the sides is mostly on the device, where there are no boundaries.
            first = int(np.searchsorted(boundaries, start.min(), side="right"))
            inside = boundaries[first : int(np.searchsorted(boundaries, stop.max(), side="left"))]
            if not inside.size:
                break
            following = np.searchsorted(inside, start, side="right")
            boundary = inside[np.minimum(following, inside.size - 1)]
            is_cut = (start < boundary) & (boundary < stop)
            if not is_cut.any():
                break
            head = sizes.copy()
            head[is_cut] = (boundary - start)[is_cut]
            tails = [column[is_cut] + head[is_cut] for column in copies[:2]]
            tails.append((sizes - head)[is_cut])
            whole = (copies[0], copies[1], head)
            dst, src, sizes = (np.concatenate(both) for both in zip(whole, tails, strict=True))
            copies = dst, src, sizes
    return copies


def split_batches(sizes: Int64Array) -> list[slice]:
    """The copies in runs of about ``BATCH_BYTES``, or ``MIN_BATCH_COPIES`` if those are more.
    Pure.
    """
    total = int(sizes.sum())
    count = max(1, min(sizes.size // MIN_BATCH_COPIES, round(total / BATCH_BYTES)))
    cuts = np.searchsorted(np.cumsum(sizes), np.arange(1, count) * (total / count)) + 1
    edges = [0, *cuts.tolist(), sizes.size]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if b > a]


def submit_copies(driver: Driver, copies: CopyList, stream: int) -> None:
    """Enqueue contiguous int64 columns of copies: in batches, or one by one where the driver takes
    no batches. The context is current.
    """
    dst, src, sizes = copies
    if not driver.has_batch_copy(stream):
        for to, source, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            driver.call("cuMemcpyAsync", to, source, size, stream)
        return
    for run in split_batches(sizes):
        to, source, size = (column[run].ctypes.data for column in (dst, src, sizes))
        driver.copy_batch(to, source, size, run.stop - run.start, SrcAccessOrder.STREAM, stream)
