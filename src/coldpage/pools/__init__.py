"""Pools: where the bytes of a slot are, in memory or on disk."""

from coldpage.pools.disk import DISK_HEADER_BYTES, DiskPool, disk_slot_bytes
from coldpage.pools.level import LevelPools, PoolGroup, split_by
from coldpage.pools.memory import MemoryPool

__all__ = [
    "DISK_HEADER_BYTES",
    "DiskPool",
    "LevelPools",
    "MemoryPool",
    "PoolGroup",
    "disk_slot_bytes",
    "split_by",
]
