"""Pools: where the bytes of a slot are, in memory or on disk."""

from coldpage.pools.disk_tier import DiskTier
from coldpage.pools.level import LevelPools, PoolGroup, split_by
from coldpage.pools.memory import MemoryPool

__all__ = ["DiskTier", "LevelPools", "MemoryPool", "PoolGroup", "split_by"]
