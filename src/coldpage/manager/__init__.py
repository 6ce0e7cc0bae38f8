"""The façade, and how it builds its levels from a configuration."""

from coldpage.manager.manager import KVCacheManager
from coldpage.manager.stats import LevelStats, ManagerStats

__all__ = ["KVCacheManager", "LevelStats", "ManagerStats"]
