"""Managers and caches of SmolLM2's geometry, without the model."""

from __future__ import annotations

from coldpage import KVCacheManager
from coldpage.bench import kv
from coldpage.bench.kv import SMOLLM2_135M, TOKENS_PER_BLOCK, evict_all, write_cache
from coldpage.config import CacheTierConfig

__all__ = ["BLOCK_BYTES", "TOKENS_PER_BLOCK", "evict_all", "make_manager", "write_cache"]

BLOCK_BYTES = SMOLLM2_135M.block_bytes


def make_manager(num_hot_blocks: int, *cold_tiers: CacheTierConfig) -> KVCacheManager:
    """A manager whose hot level holds that many blocks, in host memory."""
    return kv.make_manager(SMOLLM2_135M, num_hot_blocks, *cold_tiers)
