"""Raw copies between pools in memory, without a codec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coldpage.device.base import Stream
from coldpage.pools import MemoryPool
from coldpage.types import Int32Array

__all__ = ["copy_slots"]


def copy_slots(
    dst_pools: Sequence[MemoryPool],
    dst_slots: Int32Array,
    src_pools: Sequence[MemoryPool],
    src_slots: Int32Array,
    stream: Stream,
) -> None:
    """Enqueue slot ``src_slots[i]`` -> ``dst_slots[i]`` in every pool, one batch. Waits for no
    event itself.

    Raises SubmissionError; a part of the copies may have been enqueued then.
    """
    pairs = list(zip(dst_pools, src_pools, strict=True))
    assert all(d.slot_bytes == s.slot_bytes for d, s in pairs), "pools of different slot sizes"
    dst = np.concatenate([d.addresses(dst_slots) for d, _ in pairs])
    src = np.concatenate([s.addresses(src_slots) for _, s in pairs])
    sizes = np.repeat(np.array([d.slot_bytes for d, _ in pairs], np.int64), dst_slots.size)
    stream.copy(dst, src, sizes)
