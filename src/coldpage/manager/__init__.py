"""The façade, and how it builds its levels from a configuration."""

from coldpage.manager.manager import KVCacheManager
from coldpage.manager.observers import (
    BlockStored,
    CacheObserver,
    PageName,
    PagesDropped,
    PagesMoved,
)
from coldpage.manager.stats import CodecStats, LevelStats, ManagerStats, PoolGroupStats

__all__ = [
    "BlockStored",
    "CacheObserver",
    "CodecStats",
    "KVCacheManager",
    "LevelStats",
    "ManagerStats",
    "PageName",
    "PagesDropped",
    "PagesMoved",
    "PoolGroupStats",
]
