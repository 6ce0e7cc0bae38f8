"""Managers and caches of a real model's geometry, without the model."""

from __future__ import annotations

import numpy as np

from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.config import CacheTierConfig
from coldpage.types import BufferRole, LayerId

__all__ = ["BLOCK_BYTES", "TOKENS_PER_BLOCK", "evict_all", "make_manager", "write_cache"]

TOKENS_PER_BLOCK = 16
NUM_LAYERS = 30
BUFFER_BYTES = TOKENS_PER_BLOCK * 3 * 64 * 2  # SmolLM2-135M: 3 KV heads of 64, bfloat16
BLOCK_BYTES = NUM_LAYERS * 2 * BUFFER_BYTES


def make_manager(
    num_hot_blocks: int, *cold_tiers: CacheTierConfig, buffer_bytes: int = BUFFER_BYTES
) -> KVCacheManager:
    """A manager with the geometry of SmolLM2-135M, or with other buffers."""
    roles = (BufferRole("key"), BufferRole("value"))
    layers = tuple(
        AttentionLayerConfig(LayerId(i), tuple(BufferConfig(role, buffer_bytes) for role in roles))
        for i in range(NUM_LAYERS)
    )
    hot = DeviceTierConfig(num_hot_blocks * NUM_LAYERS * 2 * buffer_bytes)
    return KVCacheManager(KVCacheManagerConfig(TOKENS_PER_BLOCK, (hot, *cold_tiers), layers, 1.0))


def write_cache(manager: KVCacheManager, num_blocks: int, seed: int) -> KVCache:
    """A suspended cache of ``num_blocks`` committed blocks."""
    kv_cache = manager.create_kv_cache()
    assert kv_cache.resume() and kv_cache.resize(num_blocks * TOKENS_PER_BLOCK)
    kv_cache.synchronize()
    kv_cache.commit(np.arange(num_blocks * TOKENS_PER_BLOCK) + seed * 1_000_003)
    kv_cache.suspend()
    return kv_cache


def evict_all(manager: KVCacheManager) -> None:
    """Send everything hot and suspended to the colder levels, and wait until it is there."""
    filler = manager.create_kv_cache()
    assert filler.resume()
    assert filler.resize(manager.num_hot_blocks * manager.tokens_per_block)
    filler.close()
    manager.finish_transfers()
    manager.poll()
    manager.finish_transfers()
